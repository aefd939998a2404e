"""The demonstration: a tiny base model of our own, two small tasks, and the whole loop on a bare machine."""
