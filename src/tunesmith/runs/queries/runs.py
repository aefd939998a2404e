"""Runs: adding one once, finding them, and the one setter of their state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from tunesmith.core.errors import Conflict, NotFound, Refused, quoted
from tunesmith.runs.queries.leases import Lease, holds, nobody_holds, nothing_open
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.spec import RunSpec
from tunesmith.runs.tables import runs
from tunesmith.store import events
from tunesmith.store.database import Tx, broke
from tunesmith.store.lookup import find_one, get_one


@dataclass(frozen=True)
class Run:
    seq: int
    id: str
    profile: str
    campaign_id: str | None
    dataset_id: str
    parent_id: str | None
    state: RunState
    reason: str
    priority: int
    automatic: bool
    idempotency_key: str | None
    body_hash: str
    spec: RunSpec
    created_at: datetime
    created_by: str
    moved_at: datetime
    finished_at: datetime | None


def add(
    tx: Tx,
    spec: RunSpec,
    *,
    actor: str,
    priority: int,
    body_hash: str,
    idempotency_key: str | None = None,
    parent_id: str | None = None,
    automatic: bool = False,
) -> None:
    """Insert a queued run. The caller has looked for the idempotency key in the same transaction."""
    try:
        tx.run(
            runs.insert().values(
                id=spec.run_id,
                profile=spec.profile,
                campaign_id=spec.campaign_id,
                dataset_id=spec.dataset.id,
                parent_id=parent_id,
                state=RunState.QUEUED,
                reason="waits for a worker",
                priority=priority,
                automatic=automatic,
                idempotency_key=idempotency_key,
                body_hash=body_hash,
                spec=spec.model_dump(mode="json"),
                created_at=tx.now,
                created_by=actor,
                moved_at=tx.now,
            )
        )
    except exc.IntegrityError as error:
        if broke(error, "uq_runs_one_automatic", "runs.campaign_id"):
            raise Refused(f"campaign {spec.campaign_id} has an unfinished automatic run already") from error
        if broke(error, "uq_runs_idempotency_key", "runs.idempotency_key"):
            raise Conflict("the same idempotency key was used a moment ago; ask again") from error
        raise
    moved = (None, RunState.QUEUED)
    events.record(tx, "run", spec.run_id, "submitted", actor=actor, moved=moved, detail={"dataset": spec.dataset.id})


def by_key(tx: Tx, idempotency_key: str, body_hash: str) -> Run | None:
    """The run that an idempotency key made; the same key with another body is a conflict."""
    found = with_key(tx, idempotency_key)
    if found is not None and found.body_hash != body_hash:
        raise Conflict(f"the idempotency key {quoted(idempotency_key)} belongs to another request ({found.id})")
    return found


def with_key(tx: Tx, idempotency_key: str) -> Run | None:
    """The run that an idempotency key made, whatever its body was."""
    row = tx.first(sa.select(runs).where(runs.c.idempotency_key == idempotency_key))
    return None if row is None else from_row(row)


def move(
    tx: Tx,
    run_id: str,
    new: RunState,
    *,
    actor: str,
    reason: str,
    lease: Lease | None = None,
    detail: dict[str, Any] | None = None,
) -> RunState:
    """The one setter of a run's state: table, guard, event. Returns the old state.

    With a lease it must still hold; without one, nobody may hold a task of this run. A run ends after its task.
    """
    old = _state(tx, run_id)
    RUN.check(run_id, old, new)
    if lease is not None:
        allowed = holds(lease)
    else:
        allowed = nothing_open(run_id) if new in RUN.finished else nobody_holds(run_id)
    finished_at: Any = tx.now if new in RUN.finished else None
    if old in RUN.finished:
        finished_at = runs.c.finished_at  # it ended then; what became of it has changed since
    moved = tx.run(
        runs.update()
        .where(runs.c.id == run_id, runs.c.state == old, allowed)
        .values(state=new, reason=reason, moved_at=tx.now, finished_at=finished_at)
    )
    if moved != 1:
        raise Refused(f"run {run_id} is being worked on or moved on meanwhile; look again")
    events.record(tx, "run", run_id, "moved", actor=actor, moved=(old, new), reason=reason, detail=detail)
    return old


def _state(tx: Tx, run_id: str) -> RunState:
    row = tx.first(sa.select(runs.c.state).where(runs.c.id == run_id))
    if row is None:
        raise NotFound.named("run", run_id, hint="`tunesmith run list` shows them")
    return RunState(row["state"])


def get(tx: Tx, run_id: str) -> Run:
    return from_row(get_one(tx, runs, run_id, hint="`tunesmith run list` shows them"))


def find(tx: Tx, text: str) -> Run:
    """A run by id or by an unambiguous beginning of one."""
    return from_row(find_one(tx, runs, "run", text))


def listing(
    tx: Tx, *, profile: str | None = None, states: frozenset[RunState] | None = None, limit: int = 50
) -> list[Run]:
    """The newest runs first."""
    query = sa.select(runs).order_by(runs.c.seq.desc()).limit(limit)
    if profile is not None:
        query = query.where(runs.c.profile == profile)
    if states is not None:
        query = query.where(runs.c.state.in_(sorted(states)))
    return [from_row(row) for row in tx.all(query)]


def unfinished_on_dataset(tx: Tx, dataset_id: str) -> int:
    """How many unfinished runs still refer to a dataset, and so keep its reservation."""
    query = sa.select(sa.func.count()).where(runs.c.dataset_id == dataset_id, runs.c.finished_at.is_(None))
    return int(tx.conn.execute(query).scalar_one())


def about(tx: Tx, made_by: str, adapter_id: str) -> list[Run]:
    """The run that made an adapter version, and those that deployed it again, oldest first."""
    query = sa.select(runs).where(sa.or_(runs.c.id == made_by, runs.c.parent_id == made_by)).order_by(runs.c.seq)
    found = [from_row(row) for row in tx.all(query)]
    return [run for run in found if run.id == made_by or (run.spec.deploys and run.spec.deploys.id == adapter_id)]


def watching(tx: Tx, profile: str) -> Run | None:
    """The run whose deployment is being watched; while there is one, nothing else is flipped."""
    row = tx.first(sa.select(runs).where(runs.c.profile == profile, runs.c.state == RunState.WATCHING))
    return None if row is None else from_row(row)


def from_row(row: sa.RowMapping) -> Run:
    fields: dict[str, Any] = dict(row)
    return Run(**{**fields, "state": RunState(row["state"]), "spec": RunSpec.model_validate(row["spec"])})
