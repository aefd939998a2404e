"""What quick commands ask about the queue and about runs that went wrong, as plain SQL."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tunesmith.runs.rules.run import PAUSED_ON_REQUEST, RUN, RunState
from tunesmith.runs.rules.task import NEEDS_ROOM, STOPPED_BY_ESTOP, TaskKind, TaskState
from tunesmith.runs.rules.waiting import QueueFacts
from tunesmith.store.reader import EPOCH, Reader, instant_of, json_of

_COUNTED = 1000  # tasks before a task in the queue; more are not counted
OPEN_TASK = """
LEFT JOIN tasks t ON t.run_id = r.id AND t.state IN ('waiting', 'leased')"""
"""The open task of a run `r`, of which there is at most one."""
OPEN_TASK_COLUMNS = """t.id AS task_id, t.kind AS task_kind, t.state AS task_state, t.reason AS task_reason,
    t.available_at, t.available_clock"""


@dataclass(frozen=True)
class Queue:
    """What the waiting of every run depends on, read once for all of them."""

    is_stopped: bool
    """The e-stop is on."""
    num_workers: Counter[TaskKind]
    """Workers that are alive, by the kinds of task they take."""
    places: dict[str, int]
    """By waiting task, how many a worker would take before it; the first thousand only."""
    lease_clock: str
    lease_now: float

    def facts(self, row: Any, no_room: str | None) -> QueueFacts:
        """Of a run that has not ended, with the columns of its open task."""
        kind = None if row["task_kind"] is None else TaskKind(row["task_kind"])
        return QueueFacts(
            state=RunState(row["state"]),
            is_leased=row["task_state"] == TaskState.LEASED,
            is_stopped_by_estop=self.is_stopped and kind in STOPPED_BY_ESTOP,
            num_workers=0 if kind is None else self.num_workers[kind],
            num_before=0 if kind is None else self.places.get(row["task_id"], _COUNTED),
            backoff_s=self._backoff_s(row),
            reason=row["task_reason"] or row["reason"],
            no_room=no_room if kind in NEEDS_ROOM else None,
        )

    def _backoff_s(self, row: Any) -> float:
        """How long the retry table still keeps a waiting task back."""
        if row["available_at"] is None or row["available_clock"] != self.lease_clock:
            return 0.0
        return max(0.0, float(row["available_at"]) - self.lease_now)


def queue(reader: Reader) -> Queue:
    stop = reader.rows("SELECT is_on FROM switches WHERE name = 'estop'")
    alive = reader.rows(
        "SELECT kinds FROM workers WHERE seen_clock = :clock AND seen_until > :now",
        clock=reader.lease_clock,
        now=reader.lease_now,
    )
    waiting = reader.rows(
        "SELECT id FROM tasks WHERE state = 'waiting' ORDER BY priority, seq LIMIT :limit", limit=_COUNTED
    )
    return Queue(
        is_stopped=any(row["is_on"] for row in stop),
        num_workers=Counter(TaskKind(kind) for row in alive for kind in json_of(row["kinds"])),
        places={row["id"]: place for place, row in enumerate(waiting)},
        lease_clock=reader.lease_clock,
        lease_now=reader.lease_now,
    )


def has_ended(row: Any) -> bool:
    return RunState(row["state"]) in RUN.finished


_FAILED = """
SELECT r.id, r.profile, r.moved_at, r.reason,
    (SELECT a.error FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = r.id
     ORDER BY t.seq DESC, a.number DESC LIMIT 1) AS error,
    EXISTS (SELECT 1 FROM tasks t WHERE t.run_id = r.id AND t.state = 'parked') AS is_parked
FROM runs r
WHERE r.state = 'failed' AND r.moved_at >= :since
    AND r.id NOT IN (SELECT parent_id FROM runs WHERE parent_id IS NOT NULL)
ORDER BY r.seq DESC LIMIT :limit"""
_PAUSED = """
SELECT id, profile, moved_at, reason FROM runs WHERE state = 'paused' AND reason <> :asked
ORDER BY seq DESC LIMIT :limit"""
_PARKED = """
SELECT t.id, t.kind, t.profile, t.created_at, t.reason,
    (SELECT a.error FROM attempts a WHERE a.task_id = t.id ORDER BY a.number DESC LIMIT 1) AS error
FROM tasks t WHERE t.state = 'parked' AND t.run_id IS NULL ORDER BY t.seq"""
_WITHOUT_ROOM = """
SELECT t.id, t.run_id, t.kind, t.profile, t.reason, a.ended_at, a.error
FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.num_attempts
WHERE t.state = 'waiting' AND a.error_class = 'disk' ORDER BY t.seq LIMIT :limit"""


@dataclass(frozen=True)
class StoppedRun:
    """A run that goes on only if a person does something."""

    id: str
    profile: str
    since: datetime
    reason: str
    error: str = ""
    """How its last attempt ended."""
    is_parked: bool = False
    """Its task crashed too often."""


@dataclass(frozen=True)
class StoppedTask:
    """A task that was given up, or waits for room on a disk."""

    id: str
    """Of its run, where it has one."""
    kind: TaskKind
    profile: str
    since: datetime
    reason: str
    error: str


def failed(reader: Reader, *, within: timedelta, limit: int) -> list[StoppedRun]:
    """Runs that failed lately and were not tried again."""
    since = (reader.now - within - EPOCH) // timedelta(microseconds=1)
    return [
        StoppedRun(
            row["id"], row["profile"], instant_of(row["moved_at"]), row["reason"], row["error"] or "",
            bool(row["is_parked"]),
        )
        for row in reader.rows(_FAILED, since=since, limit=limit)
    ]  # fmt: skip


def paused_unasked(reader: Reader, *, limit: int) -> list[StoppedRun]:
    """Runs that nobody asked to pause: their profile was disabled or removed."""
    rows = reader.rows(_PAUSED, asked=PAUSED_ON_REQUEST, limit=limit)
    return [StoppedRun(row["id"], row["profile"], instant_of(row["moved_at"]), row["reason"]) for row in rows]


def parked(reader: Reader) -> list[StoppedTask]:
    """Tasks without a run that crashed too often."""
    return [
        StoppedTask(
            row["id"], TaskKind(row["kind"]), row["profile"] or "", instant_of(row["created_at"]), row["reason"],
            row["error"] or "",
        )
        for row in reader.rows(_PARKED)
    ]  # fmt: skip


def without_room(reader: Reader, *, limit: int) -> list[StoppedTask]:
    """Waiting tasks whose last attempt ran out of disk."""
    return [
        StoppedTask(
            row["run_id"] or row["id"], TaskKind(row["kind"]), row["profile"] or "",
            reader.now if row["ended_at"] is None else instant_of(row["ended_at"]), row["reason"], row["error"] or "",
        )
        for row in reader.rows(_WITHOUT_ROOM, limit=limit)
    ]  # fmt: skip
