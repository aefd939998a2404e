"""Readers of files: text, JSON arrays, Parquet, compressed."""
