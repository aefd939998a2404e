"""Why a run waits, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.runs.rules.run import RunState


@dataclass(frozen=True)
class QueueFacts:
    """What a waiting run's place in the queue depends on."""

    state: RunState
    is_leased: bool
    is_stopped_by_estop: bool
    num_workers: int
    num_before: int
    backoff_s: float
    reason: str
    no_room: str | None = None
    """Why the disk keeps its task from being begun, if it does."""


def why_it_waits(facts: QueueFacts) -> str | None:
    """The reason a run is not moving, in one sentence; None if somebody works on it or it has ended."""
    if facts.state in (RunState.PAUSED, RunState.HELD):
        return facts.reason
    if facts.is_leased or facts.state not in _NEEDS_A_WORKER:
        return None
    if facts.is_stopped_by_estop:
        return "the e-stop is on; `tunesmith estop off` lets it go on"
    if facts.no_room is not None:
        return f"{facts.no_room}; it goes on by itself when there is room"
    if facts.num_workers == 0:
        return "no worker is running; start one with `tunesmith worker`"
    if facts.backoff_s > 0:
        in_s = f"in {facts.backoff_s:.0f} s"
        is_watch = facts.state is RunState.WATCHING  # looks again and again, which is no failure
        last = f"the next check of the watch is {in_s}; the last one:" if is_watch else f"tried again {in_s}:"
        return f"{last} {facts.reason}"
    if facts.num_before > 0:
        return f"{facts.num_before} task{'s' if facts.num_before > 1 else ''} before it in the queue"
    return "a worker will take it within moments"


_NEEDS_A_WORKER = frozenset({RunState.QUEUED, RunState.EVALUATING, RunState.DEPLOYING, RunState.WATCHING})
