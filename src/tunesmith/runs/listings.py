"""What quick commands ask about the queue, as plain SQL."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import NEEDS_ROOM, STOPPED_BY_ESTOP, TaskKind, TaskState
from tunesmith.runs.rules.waiting import QueueFacts
from tunesmith.store.reader import Reader, json_of

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
