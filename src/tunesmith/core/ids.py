"""The only source of identifiers."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from itertools import count

from tunesmith.core.errors import UsageError, quoted

_MAX_KEY = 200
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u to misread
_ID = re.compile(r"[a-z]{2,4}-[0-9a-z]{1,16}\Z")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def new_id(prefix: str) -> str:
    """A fresh id such as ``run-4t9kq2m7x1bz``: 60 random bits, so two never meet."""
    return f"{prefix}-{_letters(secrets.randbits(60), 12)}"


def next_id(prefix: str) -> str:
    """A fresh id of 80 bits for what there are millions of and nobody types: random per process, then counted up.

    An index over such ids grows at one place per process instead of all over, so it stays fast however long it gets.
    """
    return f"{prefix}-{_letters(next(_counter) % (1 << 80), 16)}"


def secret_id(prefix: str) -> str:
    """A fresh id that cannot be guessed, for what a stranger may send back to us: the time, then 80 random bits.

    The time comes first so that an index over such ids grows at one place.
    """
    return f"{prefix}-{_letters(time.time_ns() // 1_000_000 % (1 << 50), 10)}{_letters(secrets.randbits(80), 16)}"


def new_request_id() -> str:
    """A fresh id for the log line and the answer of one request."""
    return f"req-{_letters(secrets.randbits(80), 16)}"


def _letters(bits: int, num: int) -> str:
    return "".join([_ALPHABET[bits >> shift & 31] for shift in range(5 * num - 5, -5, -5)])


def _start_anew() -> None:
    """A process counts from a random number, and a forked one from another than its parent."""
    global _counter  # noqa: PLW0603 - the one counter of the process
    _counter = count(secrets.randbits(80))


_counter = count(secrets.randbits(80))
os.register_at_fork(after_in_child=_start_anew)


def new_token() -> str:
    """A fresh secret that fences one lease or one attempt."""
    return secrets.token_hex(16)


def is_in_share(key: str, share: float, *, num_bytes: int = 8) -> bool:
    """Whether a key belongs to a share of all keys, by the first bytes of its hash: the same key always does, or never.

    Stored keys must stay where they are: a caller changes neither the form of its keys nor `num_bytes`.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:num_bytes]) < share * 2.0 ** (8 * num_bytes)


def is_id(text: str) -> bool:
    """Whether the text can be an id or the beginning of one; nothing else reaches SQL or a path."""
    return _ID.match(text) is not None


def is_name(text: str) -> bool:
    """Whether the text can name a profile or target: safe in a path, a URL and a shell line."""
    return _NAME.match(text) is not None and ".." not in text


def check_key(key: str | None) -> None:
    """Refuse an idempotency key that is none: empty, blank, too long, or not printable."""
    if key is not None and not (key.strip() and key.isprintable() and len(key) <= _MAX_KEY):
        raise UsageError(
            f"the idempotency key {quoted(key)} must be 1 to {_MAX_KEY} printable characters, not only blanks; "
            "leave it out to submit without one"
        )
