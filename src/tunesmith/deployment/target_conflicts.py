"""One place belongs to one profile: two targets that would write to the same folder, or be the same twice, are refused.

Servers such as vLLM hold versions of many profiles under names that differ; a folder has one `current`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import TunesmithError
from tunesmith.core.files import canonical_json
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.targets.directory import DirectoryTarget
from tunesmith.profiles.profile import TargetSettings as TargetConfig
from tunesmith.profiles.resolve import list_profiles
from tunesmith.profiles.workspace import Workspace
from tunesmith.store.database import Database


@dataclass(frozen=True)
class _Place:
    profile: str
    target: str
    kind: str
    folder: Path | None
    """Where a directory target writes."""
    options: str


def place_problems(
    database: Database,
    workspace: Workspace,
    profile: str,
    targets: Iterable[TargetConfig],
    environ: Mapping[str, str] | None,
) -> list[str]:
    """Why the targets of a profile cannot all be its own, one line each: compared with its others, with those of every
    other profile, and with what other profiles are deployed to now."""
    ours = list(_places(workspace, profile, targets))
    others = [
        place
        for entry in list_profiles(workspace, environ)
        if entry.profile is not None and entry.name != profile
        for place in _places(workspace, entry.name, entry.profile.targets)
    ]
    with database.read() as tx:
        deployed = [each for each in deployments.listing(tx) if each.profile != profile]
    for each in deployed:
        others += _places(workspace, each.profile, map(TargetConfig.model_validate, each.targets))
    found = []
    for number, place in enumerate(ours):
        for other in (*ours[:number], *others):
            problem = _problem(place, other)
            if problem is not None:
                found.append(f"targets.{place.target}: {problem}")
    return list(dict.fromkeys(found))


def _places(workspace: Workspace, profile: str, targets: Iterable[TargetConfig]) -> Iterable[_Place]:
    for target in targets:
        folder = None
        if target.kind == "directory":
            try:
                folder = DirectoryTarget(target.options, root=workspace.root, profile=profile).path
            except TunesmithError:
                continue  # refused by itself, with its own reason
        yield _Place(profile, target.name, target.kind, folder, _comparable(target.options))


def _comparable(options: Mapping[str, Any]) -> str:
    return canonical_json({name: value for name, value in options.items() if name != "timeout_s"})


def _problem(place: _Place, other: _Place) -> str | None:
    named = f"target {other.target}" + ("" if other.profile == place.profile else f" of profile {other.profile}")
    if place.folder is not None and other.folder is not None:
        if _is_same(place.folder, other.folder):
            return f"{place.folder} is the folder of {named} too; a folder belongs to one target: name another"
        if place.folder in other.folder.parents or other.folder in place.folder.parents:
            return f"{place.folder} and {other.folder} of {named} lie inside each other; name another folder"
        return None
    if place.profile == other.profile and (place.kind, place.options) == (other.kind, other.options):
        return f"{named} has the same kind and options; one of them is enough"
    return None


def _is_same(one: Path, other: Path) -> bool:
    """By name, or on disk: a file system may not tell Live from live."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False
