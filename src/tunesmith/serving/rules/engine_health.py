"""Whether an engine hangs: decided from its heartbeat, and from how long that has been missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_STEP_S = 300.0
"""One step that keeps computing: a pass over 512 tokens of a large model takes minutes on a small CPU."""
WORRY_S = 3.0
"""A heartbeat missing for longer is told in /healthz, before anything is done about it."""


@dataclass(frozen=True)
class StageHealth:
    """One thread of the engine: computing, reading prompts, or reading adapters."""

    still_s: float
    """How long it has neither taken the next thing to do nor worked on the last."""
    busy_s: float
    """How long it has been busy with one thing."""

    def as_json(self) -> list[float]:
        return [round(self.still_s, 2), round(self.busy_s, 2)]


def hang_of(silent_s: float, stages: Mapping[str, StageHealth], hang_s: float) -> str | None:
    """Why an engine counts as hung; None while it gets on."""
    if silent_s > hang_s:
        return f"answered no ping for {silent_s:.0f} s (serve.engine_hang_s is {hang_s:g})"
    for name, stage in stages.items():
        if stage.still_s > hang_s:
            return f"hangs: its thread {name!r} has done nothing for {stage.still_s:.0f} s"
        if stage.busy_s > MAX_STEP_S:
            return f"hangs: its thread {name!r} has been busy with one step for {stage.busy_s:.0f} s"
    return None


def worry_of(silent_s: float, stages: Mapping[str, StageHealth], hang_s: float) -> str | None:
    """What an operator should know of an engine that may be about to hang."""
    still_s = max([silent_s, *(stage.still_s for stage in stages.values())])
    if still_s <= min(WORRY_S, hang_s / 2):
        return None
    return f"gives no sign of life for {still_s:.0f} s; it is replaced after {hang_s:g} s (serve.engine_hang_s)"
