"""Detectors: stronger searches for personal data, installed beside tunesmith and named in `data.detectors`.

A detector is a plug-in: an entry point of the group `tunesmith.detectors` that names a function without parameters,
which returns an object with `find(text)`. `presidio` comes with tunesmith, and needs the extra of that name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from tunesmith.core.errors import ConfigError, did_you_mean, quoted
from tunesmith.core.plugins import entry_points_of
from tunesmith.datasets.screens.finding import Hit

GROUP = "tunesmith.detectors"
_OURS = {"presidio": ("presidio_analyzer", "tunesmith.datasets.screens.presidio")}
"""By name: the package that must be installed, and our module that uses it."""


class Detector(Protocol):
    """Looks at one text. The same text has the same hits; a hit's excerpt never repeats what was found."""

    def find(self, text: str) -> Iterable[Hit]: ...


def check_installed(name: str) -> None:
    """Raise where no such detector is installed; loads nothing."""
    if name in _OURS:
        package = _OURS[name][0]
        if find_spec(package) is None:
            raise ConfigError(f"data.detectors: {name} is not installed; pip install 'tunesmith[{name}]'")
        return
    installed = entry_points_of(GROUP)
    if name not in installed:
        known = sorted({*_OURS, *installed})
        raise ConfigError(f"data.detectors: no detector {quoted(name)}{did_you_mean(name, known)}")


@cache
def detector(name: str) -> Detector:
    """The detector of this name, loaded once for each process."""
    check_installed(name)
    made: Any = import_module(_OURS[name][1]).make() if name in _OURS else entry_points_of(GROUP)[name].load()()
    if not callable(getattr(made, "find", None)):
        raise ConfigError(f"data.detectors: the installed detector {name} has no find(text); ask who wrote it")
    found: Detector = made
    return found
