"""Whether a workspace has settings of its own: most have none, and then nothing must be imported to read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tunesmith.core.errors import ConfigError
from tunesmith.profiles.workspace import PLAIN_VARIABLES, Workspace
from tunesmith.profiles.yaml_files import read_yaml

_SECTIONS = {"store": None, "worker": None, "serve": {"hand_over": None}}
"""The sections of `Settings`, which the sample of the project file names, with their keys commented out."""


def has_plain_settings(workspace: Workspace, environ: Mapping[str, str] | None = None) -> bool:
    """Whether every setting of the workspace is the schema's default, and nothing is wrong with its project file."""
    variables = os.environ if environ is None else environ
    if any(name.upper().startswith("TUNESMITH_") and name not in PLAIN_VARIABLES for name in variables):
        return False
    try:
        return _says_nothing(read_yaml(workspace.project_file, workspace.project_file.name).tree, _SECTIONS)
    except ConfigError:
        return False  # reading it the ordinary way says what is wrong


def _says_nothing(tree: Mapping[str, Any], sections: Mapping[str, Any]) -> bool:
    return all(
        name in sections and (value is None or (isinstance(value, dict) and _says_nothing(value, sections[name] or {})))
        for name, value in tree.items()
    )
