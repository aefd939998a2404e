"""FIELD=VALUE conditions on the objects of a source, decided before anything else is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import UsageError, quoted

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Condition:
    text: str
    path: tuple[str, ...]
    value: str
    is_equal: bool

    def refuses(self, fields: dict[str, Any]) -> str | None:
        """Why the object does not meet it, to be counted; None: it does."""
        found: Any = fields
        for name in self.path:
            found = found.get(name, _MISSING) if type(found) is dict else _MISSING
        if found is _MISSING and self.is_equal:
            return f"no field {'.'.join(self.path)[:60]}"
        return None if _same(found, self.value) is self.is_equal else f"not {self.text[:60]}"


def read_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Conditions as people write them; raises UsageError."""
    return tuple(map(_condition, texts))


def _condition(text: str) -> Condition:
    name, equals, value = text.partition("=")
    is_equal = not name.endswith("!")
    path = tuple(name.removesuffix("!").strip().split("."))
    if not equals or not all(path):
        raise UsageError(f"{quoted(text)} is no condition; write FIELD=VALUE or FIELD!=VALUE, e.g. metadata.lang=en")
    return Condition(text, path, value.strip(), is_equal)


def _same(found: Any, value: str) -> bool:
    """Whether a JSON value is what somebody wrote; of a list, whether one of its values is."""
    if type(found) is list:
        return any(_same(inner, value) for inner in found)
    if type(found) is str:
        return found == value
    if found is None or type(found) is bool:
        return value.lower() == {None: "null", True: "true", False: "false"}[found]
    if type(found) in (int, float):
        try:
            return bool(float(value) == found)
        except ValueError:
            return False
    return False
