"""Profiles and campaigns in the store."""
