"""Streaming work on text: read, validate, score, deduplicate, split, publish."""
