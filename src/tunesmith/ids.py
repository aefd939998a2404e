"""The only source of identifiers."""

from __future__ import annotations

import re
import secrets

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u to misread
_ID = re.compile(r"[a-z]{2,4}-[0-9a-z]{1,16}\Z")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def new_id(prefix: str) -> str:
    """A fresh id such as ``run-4t9kq2m7x1bz``: 60 random bits, so two never meet."""
    bits = secrets.randbits(60)
    return f"{prefix}-{''.join([_ALPHABET[bits >> shift & 31] for shift in range(0, 60, 5)])}"


def new_token() -> str:
    """A fresh secret that fences one lease or one attempt."""
    return secrets.token_hex(16)


def is_id(text: str) -> bool:
    """Whether the text can be an id or the beginning of one; nothing else reaches SQL or a path."""
    return _ID.match(text) is not None


def is_name(text: str) -> bool:
    """Whether the text can name a profile or target: safe in a path, a URL and a shell line."""
    return _NAME.match(text) is not None and ".." not in text
