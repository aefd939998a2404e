"""Base models that are fetched: from a model hub, or from the Python package index; pinned, hashed, then offline."""
