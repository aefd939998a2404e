"""Forgetting: erase an experience from the store, from datasets and from what is still to be trained."""
