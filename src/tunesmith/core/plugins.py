"""Plug-ins: what installed packages register under an entry-point group, loaded and checked."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from tunesmith.core.errors import ConfigError


class Named(Protocol):
    """A plug-in says its own name, which must be the name it is registered under."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """What installed packages register in this group, by name; imports none of it."""
    return {point.name: point for point in _entry_points(group, tuple(sys.path))}


@lru_cache(maxsize=32)
def _entry_points(group: str, _path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Read once for each path: it opens the metadata of every installed package, which takes some 3 ms."""
    return tuple(entry_points(group=group))


def plugin_names(group: str) -> frozenset[str]:
    """The names that installed packages register in this group; imports none of them."""
    return frozenset(entry_points_of(group))


def load_plugins(group: str, kind: type[T], what: str) -> dict[str, T]:
    """All plug-ins of this group by name; one that cannot be used raises ConfigError."""
    return {name: _loaded(point, kind, what) for name, point in entry_points_of(group).items()}


def load_plugin(group: str, name: str, kind: type[T], what: str) -> T | None:
    """One plug-in of this group; None if no installed package registers that name."""
    point = entry_points_of(group).get(name)
    return None if point is None else _loaded(point, kind, what)


def _loaded(point: EntryPoint, kind: type[T], what: str) -> T:
    found = load_object(point, what)
    if not isinstance(found, kind) or found.name != point.name:
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(f"{_about(point, what)} is not {article} {kind.__name__} of that name")
    return found


def _about(point: EntryPoint, what: str) -> str:
    return f"the installed {what} {point.name!r} ({point.value})"


def load_object(point: EntryPoint, what: str) -> Any:
    """Import what an entry point names; ConfigError tells whose package cannot be imported."""
    try:
        return point.load()
    except Exception as error:  # whatever a foreign module raises when it is imported
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{_about(point, what)} cannot be imported ({why}); repair or uninstall its package"
        ) from error
