"""Strict reading of what other people write: JSON without a key twice in an object, text that a database can hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable
from typing import Any

from tunesmith.core.errors import DataError

OnDuplicate = Callable[[str], Exception]
"""Makes the error to raise for a key that is in one object twice."""


def loads(text: str | bytes, on_duplicate: OnDuplicate, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value that a JSON text holds; raises what `on_duplicate` makes of a key that is in one object twice.

    Like `json.loads`, it raises ValueError and RecursionError, and keeps numbers of any length as they are written.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise on_duplicate(_first_repeated(key for key, _ in pairs))
        return made

    return json.loads(text, object_pairs_hook=unique, parse_constant=parse_constant)


def refuse_repeated(text: str | bytes, keys: Container[str], on_duplicate: OnDuplicate) -> None:
    """Raises what `on_duplicate` makes of one of these keys that is in one object twice; other keys may be."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        found = [key for key, _ in pairs if key in keys]
        if len(set(found)) != len(found):
            raise on_duplicate(_first_repeated(found))

    json.loads(text, object_pairs_hook=check)


def _first_repeated(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key was repeated")


def storable(text: str) -> str:
    """The text with a mark in place of what no database stores: U+FFFD for NUL, `?` for a lone surrogate."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


def check_storable(text: str, name: str) -> None:
    """Raises DataError where a text holds NUL or a lone surrogate: no database stores these."""
    if storable(text) != text:
        raise DataError(f"{name} holds a character that no database can store (NUL, or half of a pair); remove it")
