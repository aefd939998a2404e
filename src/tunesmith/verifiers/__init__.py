"""Deterministic checks of one answer, each with a score or a flag."""
