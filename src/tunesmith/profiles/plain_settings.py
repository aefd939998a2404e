"""The settings of a workspace, read without the schema of profiles where the project file says nothing about profiles.

Building that schema takes longer than a listing. Most project files say nothing at all, and then not even the schema of
settings is needed. What cannot be read this way is resolved, and explained, by `resolve.resolve_settings`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import ConfigError
from tunesmith.profiles.workspace import PLAIN_VARIABLES, Workspace
from tunesmith.profiles.yaml_files import parse_yaml, read_text

if TYPE_CHECKING:
    from tunesmith.core.section import Section
    from tunesmith.profiles.settings import Settings

_SECTIONS = {"store": None, "worker": None, "serve": {"hand_over": None}}
"""The sections of `Settings`, which the sample of the project file names, with their keys commented out."""


def read_plainly(workspace: Workspace, environ: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """What the project file says; None where a variable has a say too, or where the file cannot be read."""
    variables = os.environ if environ is None else environ
    if any(name.upper().startswith("TUNESMITH_") and name not in PLAIN_VARIABLES for name in variables):
        return None
    try:
        shown = workspace.project_file.name
        return parse_yaml(read_text(workspace.project_file, shown), shown).tree
    except ConfigError:
        return None


def says_nothing(tree: Mapping[str, Any], sections: Mapping[str, Any] = _SECTIONS) -> bool:
    """Whether every setting is the schema's default: nothing but names of sections is there."""
    return all(
        name in sections and (value is None or (isinstance(value, dict) and says_nothing(value, sections[name] or {})))
        for name, value in tree.items()
    )


def settings_of(tree: Mapping[str, Any]) -> Settings | None:
    """The settings that a project file sets; None if it sets anything else, or sets it wrongly."""
    from pydantic import ValidationError

    from tunesmith.profiles.settings import Settings

    known = _known(Settings, tree)
    try:
        return None if known is None else Settings.model_validate_json(json.dumps(known), strict=True)
    except (ValidationError, TypeError, ValueError, RecursionError):
        return None


def _known(section: type[Section], tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a section of the file says; None if it names a key that is not there, or only under an earlier name."""
    from tunesmith.core.section import Section

    found: dict[str, Any] = {}
    for key, value in tree.items():
        info = section.model_fields.get(key)
        if info is None:
            return None
        below = info.annotation
        if not isinstance(below, type) or not issubclass(below, Section):
            found[key] = value
        elif value is not None:  # else its keys are all commented out
            inside = _known(below, value) if isinstance(value, Mapping) else None
            if inside is None:
                return None
            found[key] = inside
    return found
