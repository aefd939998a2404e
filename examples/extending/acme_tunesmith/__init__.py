"""What Acme adds to tunesmith: one module per plug-in, registered by the entry points of pyproject.toml."""
