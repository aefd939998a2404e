"""The command trainer: any program that speaks protocol v1. What is started for a trainer, and with which environment.

`trainer.options` of a profile: `argv`, a list and never a shell line; `env`, names of variables that the program may
see besides the usual few. At submit the files that `argv` names are sealed into the spec by their sha256; what such a
program reads beyond them (modules, settings) is the user's own to keep still.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ConfigError, did_you_mean, quoted
from tunesmith.core.section import Section
from tunesmith.programs import user_command
from tunesmith.training.trainers.base import TrainerInfo

_SETTING = "trainer.options.argv"
_SEALS = "sha256"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class _Options(Section):
    argv: tuple[str, ...] = Field(min_length=1)
    env: tuple[str, ...] = ()
    sha256: dict[str, str] = Field(default_factory=dict)


def argv_of(info: TrainerInfo, options: Mapping[str, Any], root: Path) -> tuple[str, ...]:
    """What to start for a trainer; refuses, in one line, what cannot be started. `root` is the workspace."""
    if info.argv:
        return info.argv
    return user_command.argv_in(root, _read(options).argv, setting=_SETTING, example="trainers/mine.py")


def environment_of(
    info: TrainerInfo, options: Mapping[str, Any], environ: Mapping[str, str], more: Iterable[str] = ()
) -> dict[str, str]:
    """What a trainer sees of the environment; `more` are names from worker.pass_environment."""
    return child_environment(environ, (*more, *(() if info.argv else _read(options).env)))


def sealed(info: TrainerInfo, options: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The options as a spec keeps them: with the sha256 of each file that the command names. Checks them on the way."""
    if info.argv:
        return dict(options)
    if _SEALS in options:
        raise ConfigError(f"trainer.options.{_SEALS}: tunesmith writes it itself; remove it")
    argv_of(info, options, root)
    return {**options, _SEALS: user_command.sealed_files(root, _read(options).argv)}


def changed_since_sealed(info: TrainerInfo, options: Mapping[str, Any], root: Path) -> str | None:
    """Why the program is no longer the one that was submitted; None if it is."""
    if info.argv:
        return None
    read = _read(options)
    return user_command.changed_since_sealed(root, read.argv, read.sha256, setting=_SETTING)


def _read(options: Mapping[str, Any]) -> _Options:
    for name in options:
        if name not in _Options.model_fields:
            raise ConfigError(f"trainer.options: no option {quoted(name)}{did_you_mean(name, ('argv', 'env'))}")
    if not isinstance(options.get("argv"), list | tuple):
        raise ConfigError("trainer.options.argv: the command trainer needs a list, e.g. [python, trainers/mine.py]")
    try:
        read = _Options.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"trainer.options.{place}: {first['msg']}") from None
    if any(not part or "\0" in part for part in read.argv):
        raise ConfigError("trainer.options.argv: an element is empty or holds a NUL")
    for name in read.env:
        if not _NAME.match(name):
            raise ConfigError(
                f"trainer.options.env: {quoted(name)} is not the name of a variable; values are not given"
            )
    return read
