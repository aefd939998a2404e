"""Servers and hand-overs in the store."""
