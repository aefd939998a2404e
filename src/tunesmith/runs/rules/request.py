"""A person's request on work under way. Cancel wins over stop, stop over pause."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tunesmith.runs.rules.run import RunState


class RequestKind(StrEnum):
    PAUSE = "pause"  # checkpoint, give the worker back, run → paused
    STOP = "stop"  # end training now, go on to evaluation with the best so far; end a watch now, and keep the version
    CANCEL = "cancel"  # end without a result
    SKIP = "skip"  # only while queued
    CHECKPOINT = "checkpoint"  # write one now and go on


_STRENGTH = {RequestKind.CANCEL: 3, RequestKind.STOP: 2, RequestKind.PAUSE: 1}

ALLOWED_IN: dict[RequestKind, frozenset[RunState]] = {
    RequestKind.PAUSE: frozenset({RunState.TRAINING}),
    RequestKind.STOP: frozenset({RunState.TRAINING, RunState.WATCHING}),
    RequestKind.CHECKPOINT: frozenset({RunState.TRAINING}),
    RequestKind.SKIP: frozenset({RunState.QUEUED}),
    RequestKind.CANCEL: frozenset(
        {
            RunState.QUEUED,
            RunState.TRAINING,
            RunState.PAUSED,
            RunState.EVALUATING,
            RunState.SHADOWING,
            RunState.HELD,
            RunState.DEPLOYING,
        }
    ),
}

INSTEAD: dict[RunState, str] = {
    RunState.QUEUED: "it has not started: use `run skip` or `run cancel`",
    RunState.TRAINING: "it is training: use `run stop`, `run pause` or `run cancel`",
    RunState.PAUSED: "it is paused: use `run resume` or `run cancel`",
    RunState.EVALUATING: "it is being evaluated: use `run cancel`",
    RunState.SHADOWING: "it shadows live traffic: use `run cancel`",
    RunState.HELD: "it waits for a person: use `adapter approve`, `adapter reject` or `run cancel`",
    RunState.DEPLOYING: "it is being deployed: use `run cancel`",
    RunState.WATCHING: "it is live and watched: use `adapter rollback`, or `run stop` to end the watch",
}


def outranked(kind: RequestKind, open_requests: Sequence[RequestKind]) -> RequestKind | None:
    """Return the open request that makes a new one pointless; None if there is none."""
    stronger = strongest(open_requests)
    if stronger is None or stronger is RequestKind.PAUSE:
        return None
    return stronger if _STRENGTH.get(kind, 0) < _STRENGTH[stronger] else None


def replaced_by(kind: RequestKind, open_requests: Sequence[RequestKind]) -> frozenset[RequestKind]:
    """Return the kinds of open requests that a new one replaces."""
    return frozenset(each for each in open_requests if _STRENGTH.get(each, 0) < _STRENGTH.get(kind, 0))


def strongest(open_requests: Sequence[RequestKind]) -> RequestKind | None:
    """Return the request that decides how the attempt ends; a checkpoint request decides nothing."""
    deciding = [kind for kind in open_requests if kind in _STRENGTH]
    return max(deciding, key=_STRENGTH.__getitem__, default=None)
