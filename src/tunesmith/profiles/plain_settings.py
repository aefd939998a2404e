"""The settings of a workspace whose project file says nothing about profiles: read without the schema of profiles.

Building that schema takes longer than a listing. What cannot be read this way is resolved, and explained, the ordinary
way (`resolve.resolve_settings`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tunesmith.core.errors import ConfigError
from tunesmith.core.section import Section
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.workspace import PLAIN_VARIABLES, Workspace
from tunesmith.profiles.yaml_files import read_yaml


def plain_settings(workspace: Workspace, environ: Mapping[str, str] | None = None) -> Settings | None:
    """The workspace's settings; None where a variable or an unusual key has a say, or something is wrong."""
    variables = os.environ if environ is None else environ
    if any(name.upper().startswith("TUNESMITH_") and name not in PLAIN_VARIABLES for name in variables):
        return None
    try:
        tree = _known(Settings, read_yaml(workspace.project_file, workspace.project_file.name).tree)
        return None if tree is None else Settings.model_validate_json(json.dumps(tree), strict=True)
    except (ConfigError, ValidationError, TypeError, ValueError, RecursionError):
        return None  # the ordinary way says what is wrong


def _known(section: type[Section], tree: Mapping[Any, Any]) -> dict[str, Any] | None:
    """What a section of the file says; None if it names a key that is not there, or only under an earlier name."""
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
