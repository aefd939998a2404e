"""Tasks and attempts: claiming by lease, renewing it, ending attempts, finding leases that ran out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.run import Priority
from tunesmith.domain.task import (
    ATTEMPT,
    STOPPED_BY_ESTOP,
    TASK,
    AttemptState,
    Counts,
    ErrorClass,
    RetryDecision,
    TaskKind,
    TaskState,
    after_attempt,
)
from tunesmith.errors import InvalidTransition, LeaseLost, NotFound
from tunesmith.ids import new_id, new_token
from tunesmith.store import events, switches
from tunesmith.store.database import Tx
from tunesmith.store.fence import Lease
from tunesmith.store.tables import attempts, tasks


@dataclass(frozen=True)
class Task:
    """One row of `tasks`, as stages and listings see it."""

    id: str
    kind: TaskKind
    run_id: str | None
    profile: str | None
    state: TaskState
    reason: str
    priority: int
    payload: dict[str, Any]
    num_attempts: int
    counts: Counts
    worker_id: str | None
    created_at: datetime


@dataclass(frozen=True)
class Attempt:
    """One execution of a task."""

    id: str
    task_id: str
    number: int
    state: AttemptState
    token: str
    error_class: str | None
    error: str | None
    worker_id: str
    process: str | None
    started_at: datetime
    ended_at: datetime | None
    result: dict[str, Any] | None


@dataclass(frozen=True)
class Claim:
    """A task that is ours now."""

    task: Task
    attempt: Attempt
    lease: Lease


def add(
    tx: Tx,
    kind: TaskKind,
    *,
    actor: str,
    run_id: str | None = None,
    profile: str | None = None,
    priority: int = Priority.NORMAL.rank,
    payload: dict[str, Any] | None = None,
    delay_s: float = 0.0,
) -> str:
    """Open a task; it waits until a worker claims it."""
    task_id = new_id("task")
    tx.run(
        tasks.insert().values(
            id=task_id,
            kind=kind,
            run_id=run_id,
            profile=profile,
            state=TaskState.WAITING,
            reason="",
            priority=priority,
            payload=payload or {},
            available_clock=tx.lease_clock if delay_s else None,
            available_at=tx.lease_now + delay_s if delay_s else None,
            num_attempts=0,
            num_crashes=0,
            num_errors=0,
            num_shrinks=0,
            created_at=tx.now,
        )
    )
    events.record(tx, "task", task_id, "opened", actor=actor, moved=(None, TaskState.WAITING), detail={"kind": kind})
    return task_id


def claim(tx: Tx, worker_id: str, kinds: Collection[TaskKind], lease_s: float) -> Claim | None:
    """Lease the first task by priority, then age. Flat as the table grows: the partial index holds only what waits."""
    allowed = set(kinds) - STOPPED_BY_ESTOP if switches.is_on(tx, switches.ESTOP) else set(kinds)
    if not allowed:
        return None
    query = (
        sa.select(tasks)
        .where(
            sa.text("state = 'waiting'"),  # a literal: a bound parameter would hide the partial index from the planner
            tasks.c.kind.in_(sorted(allowed)),
            sa.or_(tasks.c.available_at.is_(None), _due(tx)),
        )
        .order_by(tasks.c.priority, tasks.c.seq)
        .limit(1)
    )
    row = tx.first(query.with_for_update(skip_locked=True) if tx.is_postgres else query)
    return None if row is None else _lease(tx, row, worker_id, lease_s)


def _due(tx: Tx) -> sa.ColumnElement[bool]:
    return sa.or_(tasks.c.available_clock != tx.lease_clock, tasks.c.available_at <= tx.lease_now)


def _lease(tx: Tx, row: sa.RowMapping, worker_id: str, lease_s: float) -> Claim:
    lease = Lease(row["id"], new_id("att"), new_token())
    number = row["num_attempts"] + 1
    TASK.check(row["id"], TaskState(row["state"]), TaskState.LEASED)
    tx.run(
        tasks.update()
        .where(tasks.c.id == row["id"], tasks.c.state == TaskState.WAITING)
        .values(
            state=TaskState.LEASED,
            lease_token=lease.token,
            lease_clock=tx.lease_clock,
            lease_until=tx.lease_now + lease_s,
            worker_id=worker_id,
            num_attempts=number,
            available_clock=None,
            available_at=None,
        )
    )
    tx.run(
        attempts.insert().values(
            id=lease.attempt_id,
            task_id=row["id"],
            number=number,
            state=AttemptState.OPEN,
            token=new_token(),
            worker_id=worker_id,
            started_at=tx.now,
        )
    )
    moved = (TaskState.WAITING, TaskState.LEASED)
    events.record(tx, "task", row["id"], "claimed", actor=worker_id, moved=moved, detail={"attempt": lease.attempt_id})
    return Claim(get(tx, row["id"]), get_attempt(tx, lease.attempt_id), lease)


def renew(tx: Tx, lease: Lease, lease_s: float) -> None:
    """Prolong a lease that is still ours."""
    moved = tx.run(_held(lease).values(lease_clock=tx.lease_clock, lease_until=tx.lease_now + lease_s))
    _require(moved, lease)


def guard(tx: Tx, lease: Lease) -> None:
    """Raise unless the lease is still ours; on PostgreSQL also keep it so until the transaction ends."""
    query = sa.select(tasks.c.id).where(*_holder(lease))
    _require(0 if tx.first(query.with_for_update()) is None else 1, lease)


def note_process(tx: Tx, lease: Lease, process: str) -> None:
    """Remember which process runs the attempt, so that whoever takes over can make sure it is gone."""
    guard(tx, lease)
    tx.run(attempts.update().where(attempts.c.id == lease.attempt_id).values(process=process))


def end_attempt(
    tx: Tx,
    lease: Lease,
    outcome: AttemptState,
    *,
    actor: str,
    error_class: ErrorClass | None = None,
    error: str | None = None,
    result: dict[str, Any] | None = None,
) -> RetryDecision:
    """End our attempt and move its task by the retry table; the caller moves the run in the same transaction."""
    guard(tx, lease)
    row = _row(tx, lease.task_id)
    decision = after_attempt(outcome, error_class, _counts(row))
    _close_attempt(tx, lease.attempt_id, outcome, actor, error_class, error, result)
    move(tx, lease.task_id, decision.state, actor=actor, reason=decision.reason, lease=lease, decision=decision)
    return decision


def end_by(tx: Tx, lease: Lease, outcome: AttemptState, state: TaskState, *, actor: str, reason: str) -> None:
    """End our attempt and put the task where the caller says: a request, not the retry table, decided."""
    guard(tx, lease)
    _close_attempt(tx, lease.attempt_id, outcome, actor, None, reason, None)
    move(tx, lease.task_id, state, actor=actor, reason=reason, lease=lease)


def again_later(
    tx: Tx, lease: Lease, delay_s: float, *, actor: str, reason: str, payload: dict[str, Any] | None = None
) -> None:
    """The attempt did its look and the task has more to come: wait, at no cost."""
    guard(tx, lease)
    if payload is not None:
        tx.run(_held(lease).values(payload=payload))
    _close_attempt(tx, lease.attempt_id, AttemptState.SUCCEEDED, actor, None, None, None)
    counts = _counts(_row(tx, lease.task_id))
    decision = RetryDecision(TaskState.WAITING, counts, delay_s, reason)
    move(tx, lease.task_id, TaskState.WAITING, actor=actor, reason=reason, lease=lease, decision=decision)


def move(
    tx: Tx,
    task_id: str,
    new: TaskState,
    *,
    actor: str,
    reason: str,
    lease: Lease | None = None,
    decision: RetryDecision | None = None,
) -> None:
    """The one setter of a task's state. With a lease it must be ours; without one nobody may hold the task."""
    old = TaskState(_row(tx, task_id)["state"])
    TASK.check(task_id, old, new)
    values: dict[str, Any] = {
        "state": new, "reason": reason, "lease_token": None, "lease_clock": None, "lease_until": None,
    }  # fmt: skip
    if decision is not None:
        counts = decision.counts
        values |= {
            "num_crashes": counts.num_crashes, "num_errors": counts.num_errors, "num_shrinks": counts.num_shrinks,
        }  # fmt: skip
        if decision.delay_s:
            values |= {"available_clock": tx.lease_clock, "available_at": tx.lease_now + decision.delay_s}
    statement = _held(lease) if lease else tasks.update().where(tasks.c.id == task_id, tasks.c.state == old)
    moved = tx.run(statement.values(**values))
    if lease is not None:
        _require(moved, lease)
    elif moved != 1:
        raise InvalidTransition(f"task {task_id} moved on meanwhile; look again")
    events.record(tx, "task", task_id, "moved", actor=actor, moved=(old, new), reason=reason)


def expired(tx: Tx, limit: int = 20) -> list[Claim]:
    """Leases that ran out, with the lease needed to take them away from their holders."""
    over = sa.or_(tasks.c.lease_clock != tx.lease_clock, tasks.c.lease_until < tx.lease_now)
    query = sa.select(tasks).where(sa.text("state = 'leased'"), over).order_by(tasks.c.seq).limit(limit)
    rows = tx.all(query.with_for_update(skip_locked=True) if tx.is_postgres else query)
    claims = []
    for row in rows:
        attempt = open_attempt(tx, row["id"])
        claims.append(Claim(task_of(row), attempt, Lease(row["id"], attempt.id, row["lease_token"])))
    return claims


def open_attempt(tx: Tx, task_id: str) -> Attempt:
    row = tx.first(sa.select(attempts).where(attempts.c.task_id == task_id, sa.text("state = 'open'")))
    if row is None:
        raise NotFound(f"task {task_id} has no open attempt")
    return attempt_of(row)


def get(tx: Tx, task_id: str) -> Task:
    return task_of(_row(tx, task_id))


def get_attempt(tx: Tx, attempt_id: str) -> Attempt:
    row = tx.first(sa.select(attempts).where(attempts.c.id == attempt_id))
    if row is None:
        raise NotFound.named("attempt", attempt_id)
    return attempt_of(row)


def open_of_run(tx: Tx, run_id: str) -> Task | None:
    """The task of a run that waits or is leased; at most one."""
    query = sa.select(tasks).where(tasks.c.run_id == run_id, sa.text("state IN ('waiting', 'leased')"))
    row = tx.first(query.with_for_update() if tx.is_postgres else query)
    return None if row is None else task_of(row)


def _close_attempt(
    tx: Tx,
    attempt_id: str,
    outcome: AttemptState,
    actor: str,
    error_class: ErrorClass | None,
    error: str | None,
    result: dict[str, Any] | None,
) -> None:
    """The one setter of an attempt's state: open → an outcome, once."""
    ATTEMPT.check(attempt_id, get_attempt(tx, attempt_id).state, outcome)
    moved = tx.run(
        attempts.update()
        .where(attempts.c.id == attempt_id, attempts.c.state == AttemptState.OPEN)
        .values(state=outcome, error_class=error_class, error=error, result=result, ended_at=tx.now)
    )
    if moved != 1:
        raise InvalidTransition(f"attempt {attempt_id} has ended already")
    detail = {"error_class": error_class} if error_class else {}
    moved_to = (AttemptState.OPEN, outcome)
    events.record(tx, "attempt", attempt_id, "ended", actor=actor, moved=moved_to, reason=error or "", detail=detail)


def _holder(lease: Lease) -> tuple[sa.ColumnElement[bool], ...]:
    return tasks.c.id == lease.task_id, tasks.c.state == "leased", tasks.c.lease_token == lease.token


def _held(lease: Lease) -> sa.Update:
    return tasks.update().where(*_holder(lease))


def _require(moved: int, lease: Lease) -> None:
    if moved != 1:
        raise LeaseLost(f"task {lease.task_id} is no longer leased to attempt {lease.attempt_id}; nothing was changed")


def _row(tx: Tx, task_id: str) -> sa.RowMapping:
    row = tx.first(sa.select(tasks).where(tasks.c.id == task_id))
    if row is None:
        raise NotFound.named("task", task_id)
    return row


def _counts(row: sa.RowMapping) -> Counts:
    return Counts(row["num_crashes"], row["num_errors"], row["num_shrinks"])


def task_of(row: sa.RowMapping) -> Task:
    return Task(
        id=row["id"],
        kind=TaskKind(row["kind"]),
        run_id=row["run_id"],
        profile=row["profile"],
        state=TaskState(row["state"]),
        reason=row["reason"],
        priority=row["priority"],
        payload=row["payload"],
        num_attempts=row["num_attempts"],
        counts=_counts(row),
        worker_id=row["worker_id"],
        created_at=row["created_at"],
    )


def attempt_of(row: sa.RowMapping) -> Attempt:
    return Attempt(**{**row, "state": AttemptState(row["state"])})
