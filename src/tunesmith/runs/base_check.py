"""Whether a run's base is still the one it was submitted with: asked at every door between submit and the flip.

Two folders count: the one in the spec, which the run's programs load, and the one that the profile names now, on which
the adapter will be served. Content decides, not the place. See docs/decisions/0020.
"""

from __future__ import annotations

from pathlib import Path

from tunesmith.core.errors import ConfigError, TunesmithError
from tunesmith.profiles.base_model import known_digest
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.spec import RunSpec
from tunesmith.runs.spec_paths import with_absolute_paths


def base_trouble(workspace: Workspace, spec: RunSpec) -> str | None:
    """Why the run must not go on with what is there; None: it is the base that it was submitted with."""
    submitted = Path(with_absolute_paths(workspace, spec).base.path)
    for folder in dict.fromkeys((submitted, _named_now(workspace, spec.profile))):
        problem = None if folder is None else changed_base(workspace, folder, spec.base.digest)
        if problem is not None:
            return problem
    return None


def changed_base(workspace: Workspace, folder: Path, digest: str) -> str | None:
    """Why the model in a folder is not the one with that digest; None: it is."""
    try:
        found = known_digest(folder, workspace.cache_dir)
    except ConfigError as error:
        return f"{error.message}; put it back"
    if found == digest:
        return None
    return (
        f"the base model in {folder} is not the one that was locked: its digest was {digest[:12]}… and is "
        f"{found[:12]}…; put it back"
    )


def _named_now(workspace: Workspace, profile: str) -> Path | None:
    """The base in the profile's file; None where there is no readable one, which is for others to judge."""
    try:
        return workspace.locate(resolve(profile, workspace=workspace).profile.base.path)
    except TunesmithError:
        return None
