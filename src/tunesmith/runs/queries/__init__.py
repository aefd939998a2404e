"""Runs, tasks, leases and workers in the store: reads, and one setter per state."""
