"""The contract of a target: can it serve this adapter, make it serve, say what it serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunesmith.errors import TunesmithError


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
    """Every method may be called again after a crash and then does the same thing once."""

    def refusal(self, adapter: ServedAdapter) -> str | None:
        """Trial load: why this target cannot serve the adapter, or None. Changes nothing that is served."""

    def serve(self, adapter: ServedAdapter | None) -> None:
        """Serve this adapter, or the bare base; raises TargetError. At every moment the old or the new is served."""

    def observe(self) -> str | None:
        """The verified digest of what is served now; None for the bare base. Raises TargetError if unhealthy."""
