"""The embedded engine: a process of its own that loads a base and its adapters and answers many at once."""
