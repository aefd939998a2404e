"""A deployment that a person forces past the gate: who, why, and what was live when they decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_KEY = "forced"


@dataclass(frozen=True)
class Forced:
    by: str
    reason: str
    baseline: str
    """Digest of what was live then; if that changes before the flip, the version is measured instead."""

    def __str__(self) -> str:
        return f", forced past the gate by {self.by}: {self.reason}"

    def payload(self) -> dict[str, Any]:
        """As a deploy task carries it."""
        return {_KEY: asdict(self)}


def forced_by(payload: Mapping[str, Any]) -> Forced | None:
    """Who forced the deployment that a task carries out; None where the gate decides."""
    found = payload.get(_KEY)
    return None if found is None else Forced(**found)
