"""Puts the folder of shared builders on the import path of every test."""
