"""Llama-like decoders with LoRA, computed our own way: fewer and larger products, less kept, nothing waited for."""

FAST_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Whose layers the fast path computes itself."""
