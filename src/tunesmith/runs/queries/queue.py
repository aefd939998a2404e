"""Questions about tasks and attempts: what a run did, what waits, what waits before it. Reads only."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tunesmith.runs.queries import switches
from tunesmith.runs.queries.tasks import Attempt, Task, attempt_of, task_of
from tunesmith.runs.rules.task import STOPPED_BY_ESTOP, AttemptState, TaskKind
from tunesmith.runs.tables import attempts, tasks
from tunesmith.store.database import Tx


def of_run(tx: Tx, run_id: str) -> list[Task]:
    return [task_of(row) for row in tx.all(sa.select(tasks).where(tasks.c.run_id == run_id).order_by(tasks.c.seq))]


def attempts_of_run(tx: Tx, run_id: str) -> list[Attempt]:
    """All attempts of all tasks of a run, oldest first."""
    query = (
        sa.select(attempts)
        .join(tasks, tasks.c.id == attempts.c.task_id)
        .where(tasks.c.run_id == run_id)
        .order_by(tasks.c.seq, attempts.c.number)
    )
    return [attempt_of(row) for row in tx.all(query)]


def paces(tx: Tx, profile: str, limit: int = 20) -> list[tuple[int, float]]:
    """(examples seen, over all epochs; seconds) of the newest succeeded training attempts of a profile."""
    query = (
        sa.select(attempts.c.result)
        .join(tasks, tasks.c.id == attempts.c.task_id)
        .where(tasks.c.profile == profile, tasks.c.kind == TaskKind.TRAIN, attempts.c.state == AttemptState.SUCCEEDED)
        .order_by(tasks.c.seq.desc())
        .limit(limit)
    )
    results = [row["result"] or {} for row in tx.all(query)]
    seen = [(r.get("detail", {}).get("num_seen") or r.get("num_trained_examples"), r.get("train_s")) for r in results]
    return [(num, train_s) for num, train_s in seen if num and train_s]


def memory_ratios(tx: Tx, limit: int = 200) -> dict[str, list[float]]:
    """By shape key, what the newest succeeded trainings took as multiples of their forecasts, of any profile."""
    query = (
        sa.select(attempts.c.result)
        .join(tasks, tasks.c.id == attempts.c.task_id)
        .where(tasks.c.kind == TaskKind.TRAIN, attempts.c.state == AttemptState.SUCCEEDED)
        .order_by(tasks.c.seq.desc())
        .limit(limit)
    )
    found: dict[str, list[float]] = {}
    for row in tx.all(query):
        memory = ((row["result"] or {}).get("detail") or {}).get("memory")
        if not isinstance(memory, dict):  # a program of somebody else may tell whatever it likes
            continue
        key, ratio = memory.get("key"), memory.get("ratio")
        if isinstance(key, str) and isinstance(ratio, int | float) and not isinstance(ratio, bool):
            found.setdefault(key, []).append(float(ratio))
    return found


def any_open(tx: Tx, kinds: Collection[TaskKind]) -> bool:
    """Whether anything waits or is under way that a worker for these kinds may still have to do."""
    able = set(kinds) - STOPPED_BY_ESTOP if switches.is_on(tx, switches.ESTOP) else set(kinds)
    # a rollback that failed is tried for ever: it is no reason to wait
    hopeless = sa.and_(tasks.c.kind == TaskKind.RECONCILE, tasks.c.available_at.is_not(None))
    query = sa.select(tasks.c.id).where(
        sa.text("state IN ('waiting', 'leased')"), tasks.c.kind.in_(sorted(able)), sa.not_(hopeless)
    )
    return tx.first(query.limit(1)) is not None
