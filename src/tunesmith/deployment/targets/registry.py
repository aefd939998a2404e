"""The targets by kind, ours and those that installed packages bring (entry-point group `tunesmith.targets`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.core.errors import NotFound
from tunesmith.core.plugins import entry_points_of, load_object
from tunesmith.deployment.targets.base import Target
from tunesmith.deployment.targets.command import CommandTarget
from tunesmith.deployment.targets.directory import DirectoryTarget
from tunesmith.deployment.targets.embedded import EmbeddedTarget
from tunesmith.deployment.targets.llamacpp.target import llamacpp_target
from tunesmith.deployment.targets.ollama import OllamaTarget
from tunesmith.deployment.targets.vllm import VllmTarget

GROUP = "tunesmith.targets"
TARGETS: dict[str, Callable[..., Target]] = {
    "directory": DirectoryTarget,
    "embedded": EmbeddedTarget,
    "vllm": VllmTarget,
    "llamacpp": llamacpp_target,
    "ollama": OllamaTarget,
    "command": CommandTarget,
}


def target_kinds() -> frozenset[str]:
    return frozenset(TARGETS) | frozenset(entry_points_of(GROUP))


def make_target(kind: str, options: dict[str, Any], *, root: Path, profile: str) -> Target:
    """The target of that kind, ready to use; the options are checked here."""
    factory = TARGETS.get(kind)
    if factory is None and (point := entry_points_of(GROUP).get(kind)) is not None:
        factory = load_object(point, "target")
    if factory is None:
        raise NotFound.named("target kind", kind, target_kinds())
    return factory(options, root=root, profile=profile)
