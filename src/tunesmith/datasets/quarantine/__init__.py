"""Rows that were quarantined, and what people decide about them."""
