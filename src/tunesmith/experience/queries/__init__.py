"""Experiences, feedback, reviews and dataset members in the store."""
