"""Screens: what must not be trained without a person's look; each says what it found, where, and why it matters."""
