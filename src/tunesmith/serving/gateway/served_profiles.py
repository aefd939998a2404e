"""The served profiles: the settings of each profile file that serving needs; reloaded when the files change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import TunesmithError
from tunesmith.core.files import canonical_json
from tunesmith.core.ids import is_name
from tunesmith.deployment.serving_targets import ANSWERING_KINDS
from tunesmith.profiles.profile import TargetSettings
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.sections.experience import CapturePolicy
from tunesmith.profiles.workspace import Workspace

EMBEDDED = "embedded"


@dataclass(frozen=True)
class ServedProfile:
    """One profile: its base model, the target of its requests, and its capture policy."""

    profile: str
    base: Path
    target: TargetSettings
    capture: CapturePolicy
    max_tokens: int
    """Default of a request without a limit."""

    @property
    def is_embedded(self) -> bool:
        return self.target.kind == EMBEDDED


class ServedProfiles:
    """The profiles of a workspace. A file that became invalid keeps its last valid settings, with its problem."""

    def __init__(self, workspace: Workspace, environ: Mapping[str, str] | None) -> None:
        self._workspace = workspace
        self._environ = environ
        self._read: dict[str, tuple[Any, ServedProfile | None]] = {}
        self.problems: dict[str, str] = {}

    def names(self) -> list[str]:
        folder = self._workspace.profiles_dir
        try:
            return sorted(path.stem for path in folder.glob("*.yaml") if is_name(path.stem))
        except OSError:
            return sorted(self._read)

    def refresh(self, overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, ServedProfile]:
        """Every profile that can be served; `overrides` are those of campaigns."""
        found = {}
        names = self.names()
        for name in names:
            served = self._one(name, overrides.get(name, {}))
            if served is not None:
                found[name] = served
        for name in set(self._read) - set(names):
            del self._read[name]
            self.problems.pop(name, None)
        return found

    def _one(self, name: str, overrides: Mapping[str, Any]) -> ServedProfile | None:
        files = (self._workspace.profiles_dir / f"{name}.yaml", self._workspace.project_file)
        stamp = (*map(_stamp, files), canonical_json(dict(overrides)))
        known = self._read.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        served: ServedProfile | None
        try:
            served = self._resolve(name, overrides)
            self.problems.pop(name, None)
        except TunesmithError as error:
            self.problems[name] = error.message
            served = None if known is None else known[1]
        self._read[name] = (stamp, served)
        return served

    def _resolve(self, name: str, overrides: Mapping[str, Any]) -> ServedProfile:
        resolved = resolve(name, workspace=self._workspace, campaign_overrides=overrides, environ=self._environ)
        profile = resolved.profile
        asked = [target for target in profile.targets if target.kind in ANSWERING_KINDS]
        target = asked[0] if asked else TargetSettings(name=EMBEDDED, kind=EMBEDDED)
        base, capture = self._workspace.locate(profile.base.path), profile.experience.capture
        return ServedProfile(name, base, target, capture, profile.answers.max_tokens)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        about = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (about.st_mtime_ns, about.st_size, about.st_ino)
