"""What quick commands ask about profiles, as plain SQL."""

from __future__ import annotations

from tunesmith.store.reader import Reader


def is_locked(reader: Reader, name: str) -> bool:
    """Whether the store knows a profile."""
    return bool(reader.rows("SELECT name FROM profiles WHERE name = :name", name=name))
