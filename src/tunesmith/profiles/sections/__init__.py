"""Sections of a profile that belong to one subject each; the decisions about them are in that subject's package."""
