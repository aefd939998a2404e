"""Erasures in the store, and what an erasure affects."""
