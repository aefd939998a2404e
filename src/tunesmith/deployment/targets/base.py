"""The contract of a target, in the order of a deployment: may it, can it, load, probe, flip, drain, unload; observe.

Names are never reused (`support@v7`), so a target may hold several versions at once and nothing cached under a name
can belong to another. Every method may be called again after a crash and then does the same thing once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunesmith.core.errors import TunesmithError
from tunesmith.programs.readings import ProbeResult


class TargetError(TunesmithError):
    """A target could not do what it was asked; trying again may help."""

    code = "target"


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter version as a target sees it: a name that is never reused, a place, a content."""

    name: str
    path: Path
    digest: str


class Target(Protocol):
    def refusal(self, adapter: ServedAdapter) -> str | None:
        """Its limits, and a trial load: why this target cannot serve the adapter, or None.

        Changes nothing that is served. Raises TargetError where the target cannot be asked now.
        """

    def load(self, adapter: ServedAdapter) -> None:
        """Have it ready beside what is served, to be asked for by its name."""

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        """What a loaded adapter makes of prompts here, greedily; None where nobody can be asked (a directory)."""

    def flip(self, adapter: ServedAdapter | None) -> None:
        """Let the profile's name mean this version, or the bare base. At every moment the old or the new is served."""

    def drain(self, name: str, timeout_s: float) -> None:
        """Wait until nothing is answered by that version any more; raises TargetError after `timeout_s`."""

    def unload(self, name: str) -> None:
        """Let a version go that is not served; an unknown name is no error."""

    def loaded(self) -> frozenset[str]:
        """The names of this profile's versions that it holds now."""

    def observe(self) -> str | None:
        """The verified digest of what is served now; None for the bare base. Raises TargetError if unhealthy."""


@dataclass(frozen=True)
class Endpoint:
    """The OpenAI endpoint of one version: its URL, and the name of the version there."""

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body besides `model` that select the version; they override those of a request."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for fields that a request leaves out."""
    is_named: bool = True
    """Whether an answer names its model; it must then be the requested one."""


class ProxyTarget(Target, Protocol):
    """A target of ours to which the gateway forwards requests (`serving_targets.ANSWERING_KINDS`)."""

    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        """One per replica; None is the base model alone. Raises TargetError if there is none."""
