"""A command of the user's in a profile: how it is started, which files it names, and whether they have changed.

A command is a list and never a shell line. `python` as its first element is the running interpreter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.core.errors import ConfigError, quoted
from tunesmith.core.files import sha256_file

PYTHON = "python"


def argv_in(root: Path, command: Sequence[str], *, setting: str, example: str) -> tuple[str, ...]:
    """The command with absolute paths, as it is started; ConfigError, naming the setting, if it cannot be."""
    first, *rest = command
    if first == PYTHON and not rest:
        raise ConfigError(f"{setting}: name the program too, e.g. [{PYTHON}, {example}]")
    return (_program(root, first, setting), *(str(_file_named(root, part) or part) for part in rest))


def sealed_files(root: Path, command: Sequence[str]) -> dict[str, str]:
    """The sha256 of each file that the command names, by the element that names it."""
    named = {part: path for part in command if (path := _file_named(root, part)) is not None}
    return {part: sha256_file(path) for part, path in named.items()}


def changed_since_sealed(root: Path, command: Sequence[str], sealed: Mapping[str, str], *, setting: str) -> str | None:
    """Which files changed, went or came since the run was submitted; None if none did."""
    found = sealed_files(root, command)
    names = [quoted(part) for part in dict.fromkeys((*sealed, *found)) if sealed.get(part) != found.get(part)]
    return f"{setting}: {', '.join(names)} changed since the run was submitted" if names else None


def _program(root: Path, first: str, setting: str) -> str:
    """A file of the workspace, or what PATH finds."""
    if first == PYTHON:
        return first
    named = _file_named(root, first)
    if named is not None:
        if not os.access(named, os.X_OK):
            raise ConfigError(f"{setting}: {quoted(first)} is not executable; chmod +x it, or put {PYTHON} before")
        return str(named)
    found = None if "/" in first else shutil.which(first)
    if found is None:
        raise ConfigError(f"{setting}: no program {quoted(first)} in the workspace or on PATH")
    return found


def _file_named(root: Path, part: str) -> Path | None:
    """The file of the workspace, or the absolute one, that an element names; options such as --steps name none."""
    if part == PYTHON or part.startswith("-"):
        return None
    try:
        path = (root / part).resolve()
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None
