"""Corrections, spends and cycles in the store."""
