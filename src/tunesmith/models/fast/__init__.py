"""Llama-like decoders with LoRA, computed our own way: fewer and larger products, less kept, nothing waited for."""
