"""Plug-ins: what installed packages register under an entry-point group, loaded and checked."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, TypeVar

from tunesmith.core.errors import ConfigError


class Named(Protocol):
    """A plug-in says its own name, which must be the name it is registered under."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def plugin_names(group: str) -> frozenset[str]:
    """The names that installed packages register in this group; imports none of them."""
    return frozenset(point.name for point in entry_points(group=group))


def load_plugins(group: str, kind: type[T], what: str) -> dict[str, T]:
    """All plug-ins of this group by name; one that cannot be used raises ConfigError."""
    return {point.name: _loaded(point, kind, what) for point in entry_points(group=group)}


def load_plugin(group: str, name: str, kind: type[T], what: str) -> T | None:
    """One plug-in of this group; None if no installed package registers that name."""
    found = None
    for point in entry_points(group=group, name=name):
        found = _loaded(point, kind, what)
    return found


def _loaded(point: EntryPoint, kind: type[T], what: str) -> T:
    about = f"the installed {what} {point.name!r} ({point.value})"
    try:
        found = point.load()
    except Exception as error:  # whatever a foreign module raises when it is imported
        raise ConfigError(
            f"{about} cannot be imported ({type(error).__name__}: {error}); repair or uninstall its package"
        ) from error
    if not isinstance(found, kind) or found.name != point.name:
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(f"{about} is not {article} {kind.__name__} of that name")
    return found
