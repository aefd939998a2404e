"""What `config explain` shows: every key, its value, who said it, and what it is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import NotFound
from tunesmith.profiles.layers import Origin, dotted
from tunesmith.profiles.resolve import Resolved
from tunesmith.profiles.schema import UnknownKey, current_path, find, places

_PASSWORD = re.compile(r"(?<=://)([^/@:]*):.*@|(?<=password=)[^&]*")


@dataclass(frozen=True)
class Row:
    """One key."""

    key: str
    value: Any
    origin: Origin
    doc: str


def explain(resolved: Resolved, key: str | None = None) -> list[Row]:
    """Every key; or one key, or those of one section."""
    if key:
        wanted = current_path(tuple(key.split(".")))
        key = ".".join(wanted)
        try:
            find(wanted)
        except UnknownKey as unknown:
            raise NotFound(f"{dotted(wanted)}: {unknown.problem.reason}") from None
    return [
        Row(
            name, without_password(resolved.values[name]) if name == "store.url" else resolved.values[name], origin, doc
        )
        for name, origin in resolved.origins.items()
        if not key or name == key or name.startswith(f"{key}.")
        for doc in [_doc(name)]
    ]


def without_password(url: str | None) -> str | None:
    """A database URL that may be shown."""
    return _PASSWORD.sub(lambda found: f"{found[1]}:…@" if found[1] is not None else "…", url) if url else url


def _doc(name: str) -> str:
    field = next(known for known in places() if name == known or name.startswith(f"{known}."))
    return places()[field].info.description or ""
