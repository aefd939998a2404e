"""Formats of training data: each row becomes one example."""
