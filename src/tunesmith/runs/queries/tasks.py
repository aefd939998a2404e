"""Tasks and attempts: claiming by lease, renewing it, ending attempts, finding leases that ran out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import InvalidTransition, LeaseLost, NotFound
from tunesmith.core.ids import new_token, next_id
from tunesmith.runs.queries import task_statements as sql
from tunesmith.runs.queries.leases import Lease, holds
from tunesmith.runs.rules.run import Priority
from tunesmith.runs.rules.task import (
    ATTEMPT,
    TASK,
    AttemptState,
    Counts,
    DiskWait,
    ErrorClass,
    RetryDecision,
    TaskKind,
    TaskState,
    after_attempt,
)
from tunesmith.runs.tables import attempts, tasks
from tunesmith.store import events
from tunesmith.store.compiled_statements import execute_batch
from tunesmith.store.database import Tx
from tunesmith.store.lookup import get_one


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
class LeasedTask:
    """A leased task as its holder sees it: its failure counts, and the state of its attempt."""

    counts: Counts
    attempt: AttemptState


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended, and what follows for its task."""

    outcome: AttemptState
    decision: RetryDecision
    error_class: ErrorClass | None = None
    error: str | None = None
    result: dict[str, Any] | None = None
    payload: dict[str, Any] | None = None
    """The task's new payload, if it will be attempted again."""


@dataclass(frozen=True)
class Claim:
    """A task with the attempt and the lease of its holder."""

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
    task_id = next_id("task")
    values = {
        "id": task_id,
        "kind": kind,
        "run_id": run_id,
        "profile": profile,
        "priority": priority,
        "payload": payload or {},
        "available_clock": tx.lease_clock if delay_s else None,
        "available_at": tx.lease_now + delay_s if delay_s else None,
        "created_at": tx.now,
    }
    moved = (None, TaskState.WAITING)
    opened = events.entry(tx, "task", task_id, "opened", actor=actor, moved=moved, detail={"kind": kind})
    execute_batch(tx, (sql.ADD, values), opened)
    return task_id


def claim(tx: Tx, worker_id: str, kinds: Collection[TaskKind], lease_s: float) -> Claim | None:
    """Lease the first task by priority, then age. Flat as the table grows: the partial index holds only what waits."""
    if not kinds:
        return None
    token, attempt_id = new_token(), next_id("att")
    row = sql.claim_first(frozenset(kinds)).first(
        tx, token=token, worker=worker_id, clock=tx.lease_clock, lease_s=lease_s
    )
    if row is None:
        return None
    task = task_of(row)
    attempt = Attempt(
        id=attempt_id,
        task_id=task.id,
        number=task.num_attempts,
        state=AttemptState.OPEN,
        token=new_token(),
        error_class=None,
        error=None,
        worker_id=worker_id,
        process=None,
        started_at=tx.now,
        ended_at=None,
        result=None,
    )
    started = {
        "id": attempt_id,
        "task_id": task.id,
        "number": attempt.number,
        "token": attempt.token,
        "worker_id": worker_id,
        "started_at": tx.now,
    }
    moved = (TaskState.WAITING, TaskState.LEASED)
    claimed = events.entry(tx, "task", task.id, "claimed", actor=worker_id, moved=moved, detail={"attempt": attempt_id})
    execute_batch(tx, (sql.START, started), claimed)
    return Claim(task, attempt, Lease(task.id, attempt_id, token))


def renew(tx: Tx, lease: Lease, lease_s: float) -> None:
    """Prolong a lease that is still ours."""
    if not sql.RENEW.run(tx, task_id=lease.task_id, token=lease.token, clock=tx.lease_clock, lease_s=lease_s):
        raise _lost(lease)


def require_lease(tx: Tx, lease: Lease) -> LeasedTask:
    """Raise LeaseLost unless the lease is still ours. On PostgreSQL it is also locked until the transaction ends."""
    row = sql.HOLD.first(tx, task_id=lease.task_id, token=lease.token)
    if row is None:
        raise _lost(lease)
    return LeasedTask(Counts(row["num_crashes"], row["num_errors"], row["num_shrinks"]), AttemptState(row["state"]))


def is_held(tx: Tx, lease: Lease) -> bool:
    """Whether the lease is still ours at this moment; `require_lease` also locks it."""
    return tx.first(sa.select(sa.literal(1)).where(holds(lease))) is not None


def note(tx: Tx, lease: Lease, **more: Any) -> None:
    """Add to what our task carries, for the next attempt of it."""
    require_lease(tx, lease)
    payload = {**get(tx, lease.task_id).payload, **more}
    tx.run(tasks.update().where(tasks.c.id == lease.task_id).values(payload=payload))


def note_process(tx: Tx, lease: Lease, process: str) -> None:
    """Remember which process runs the attempt, so that whoever takes over can make sure it is gone."""
    require_lease(tx, lease)
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
    held = require_lease(tx, lease)
    disk = _disk_wait(tx, lease, error) if error_class is ErrorClass.DISK else DiskWait()
    decision = after_attempt(outcome, error_class, held.counts, disk)
    _end(tx, lease, held, AttemptEnd(outcome, decision, error_class, error, result), actor)
    return decision


def _disk_wait(tx: Tx, lease: Lease, error: str | None) -> DiskWait:
    """How often this task has waited for room before; its attempts tell."""
    ended_so = (attempts.c.task_id == lease.task_id, attempts.c.error_class == ErrorClass.DISK)
    before = tx.conn.execute(sa.select(sa.func.count()).where(*ended_so)).scalar_one()
    first = (error or "").strip().splitlines()
    return DiskWait(first[0] if first else DiskWait.why, int(before))


def end_by(tx: Tx, lease: Lease, outcome: AttemptState, state: TaskState, *, actor: str, reason: str) -> None:
    """End our attempt and put the task where the caller says: a request, not the retry table, decided."""
    held = require_lease(tx, lease)
    _end(tx, lease, held, AttemptEnd(outcome, RetryDecision(state, held.counts, 0.0, reason), error=reason), actor)


def reschedule(
    tx: Tx,
    lease: Lease,
    delay_s: float,
    *,
    actor: str,
    reason: str,
    payload: dict[str, Any] | None = None,
    outcome: AttemptState = AttemptState.SUCCEEDED,
) -> None:
    """End a successful attempt of a task that has more to do: it waits `delay_s`, and its failure counts are reset."""
    decision = RetryDecision(TaskState.WAITING, Counts(), delay_s, reason)
    _end(tx, lease, require_lease(tx, lease), AttemptEnd(outcome, decision, payload=payload), actor)


def defer_unstarted(tx: Tx, lease: Lease, delay_s: float, *, actor: str, reason: str) -> None:
    """Defer a task whose attempt could not start. Its failure counts stay as they are."""
    held = require_lease(tx, lease)
    decision = RetryDecision(TaskState.WAITING, held.counts, delay_s, reason)
    _end(tx, lease, held, AttemptEnd(AttemptState.INTERRUPTED, decision, error=reason), actor)


def _end(tx: Tx, lease: Lease, held: LeasedTask, end: AttemptEnd, actor: str) -> None:
    """Set the outcome of an attempt and the next state of its task, and release the lease; nothing else does."""
    decision = end.decision
    ATTEMPT.check(lease.attempt_id, held.attempt, end.outcome)
    TASK.check(lease.task_id, TaskState.LEASED, decision.state)
    closed = {
        "attempt_id": lease.attempt_id,
        "new_state": end.outcome,
        "new_error_class": end.error_class,
        "new_error": end.error,
        "new_result": end.result,
        "new_ended_at": tx.now,
    }
    released = {
        "task_id": lease.task_id,
        "token": lease.token,
        "new_state": decision.state,
        "why": decision.reason,
        "new_num_crashes": decision.counts.num_crashes,
        "new_num_errors": decision.counts.num_errors,
        "new_num_shrinks": decision.counts.num_shrinks,
        "new_available_clock": tx.lease_clock if decision.delay_s else None,
        "new_available_at": tx.lease_now + decision.delay_s if decision.delay_s else None,
        "new_payload": end.payload,
    }
    detail = {"error_class": end.error_class} if end.error_class else {}
    outcome, left = (AttemptState.OPEN, end.outcome), (TaskState.LEASED, decision.state)
    touched = execute_batch(
        tx,
        (sql.CLOSE, closed),
        (sql.RELEASE, released),
        events.entry(
            tx, "attempt", lease.attempt_id, "ended",
            actor=actor, moved=outcome, reason=end.error or "", detail=detail,
        ),
        events.entry(tx, "task", lease.task_id, "moved", actor=actor, moved=left, reason=decision.reason),
    )  # fmt: skip
    if touched[:2] != [1, 1]:
        raise _lost(lease)


def move(tx: Tx, task_id: str, new: TaskState, *, actor: str, reason: str) -> None:
    """Move a task that nobody holds; a leased one moves when its attempt ends."""
    old = get(tx, task_id).state
    TASK.check(task_id, old, new)
    where = (tasks.c.id == task_id, tasks.c.state == old, tasks.c.lease_token.is_(None))
    if tx.run(tasks.update().where(*where).values(state=new, reason=reason)) != 1:
        raise InvalidTransition(f"task {task_id} is leased or has just changed state; check `run show` and retry")
    events.record(tx, "task", task_id, "moved", actor=actor, moved=(old, new), reason=reason)


def expired(tx: Tx, limit: int = 20) -> list[Claim]:
    """Return claims whose lease has expired, with the lease that is needed to end them."""
    over = sa.or_(tasks.c.lease_clock != tx.lease_clock, tasks.c.lease_until < tx.lease_now)
    query = sa.select(tasks).where(sa.text("state = 'leased'"), over).order_by(tasks.c.seq).limit(limit)
    return [_claim_of(tx, row) for row in tx.all(query.with_for_update(skip_locked=True))]


def leased_by(tx: Tx, worker_id: str) -> Claim | None:
    """What a worker holds, for one that does not know: the answer to its claim was lost."""
    row = tx.first(sa.select(tasks).where(sa.text("state = 'leased'"), tasks.c.worker_id == worker_id))
    return None if row is None else _claim_of(tx, row)


def _claim_of(tx: Tx, row: sa.RowMapping) -> Claim:
    attempt = open_attempt(tx, row["id"])
    return Claim(task_of(row), attempt, Lease(row["id"], attempt.id, row["lease_token"]))


def open_attempt(tx: Tx, task_id: str) -> Attempt:
    row = tx.first(sa.select(attempts).where(attempts.c.task_id == task_id, sa.text("state = 'open'")))
    if row is None:
        raise NotFound(f"task {task_id} has no open attempt")
    return attempt_of(row)


def get(tx: Tx, task_id: str) -> Task:
    return task_of(get_one(tx, tasks, task_id))


def open_of_run(tx: Tx, run_id: str, *, lock: bool = False) -> Task | None:
    """The task of a run that waits or is leased; at most one. With `lock` it stays so until the transaction ends."""
    query = sa.select(tasks).where(tasks.c.run_id == run_id, sa.text("state IN ('waiting', 'leased')"))
    row = tx.first(query.with_for_update() if lock else query)
    if row is None and lock:
        # on PostgreSQL we may have waited for a task that ended meanwhile, and its successor came after our snapshot
        row = tx.first(query.with_for_update())
    return None if row is None else task_of(row)


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"task {lease.task_id} is no longer leased to attempt {lease.attempt_id}; nothing was recorded")


def task_of(row: Mapping[Any, Any]) -> Task:
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
        counts=Counts(row["num_crashes"], row["num_errors"], row["num_shrinks"]),
        worker_id=row["worker_id"],
        created_at=row["created_at"],
    )


def attempt_of(row: sa.RowMapping) -> Attempt:
    return Attempt(**{**row, "state": AttemptState(row["state"])})
