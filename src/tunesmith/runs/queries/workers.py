"""Workers that are alive and the task kinds they take, so that a waiting run can say why it waits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.tables import workers
from tunesmith.store.database import Tx


@dataclass(frozen=True)
class Worker:
    id: str
    host: str
    kinds: tuple[TaskKind, ...]
    started_at: datetime


def register(tx: Tx, worker_id: str, *, host: str, process: str, kinds: Collection[TaskKind], alive_s: float) -> None:
    tx.run(
        workers.insert().values(
            id=worker_id,
            host=host,
            process=process,
            kinds=sorted(kinds),
            started_at=tx.now,
            seen_clock=tx.lease_clock,
            seen_until=tx.lease_now + alive_s,
        )
    )


def heartbeat(tx: Tx, worker_id: str, alive_s: float) -> None:
    tx.run(
        workers.update()
        .where(workers.c.id == worker_id)
        .values(seen_clock=tx.lease_clock, seen_until=tx.lease_now + alive_s)
    )


def leave(tx: Tx, worker_id: str) -> None:
    tx.run(workers.delete().where(workers.c.id == worker_id))


def remove_expired(tx: Tx) -> None:
    """Remove workers whose heartbeat has expired: they were killed."""
    tx.run(workers.delete().where(sa.not_(_alive(tx))))


def alive(tx: Tx) -> list[Worker]:
    rows = tx.all(sa.select(workers).where(_alive(tx)).order_by(workers.c.started_at))
    return [Worker(r["id"], r["host"], tuple(TaskKind(k) for k in r["kinds"]), r["started_at"]) for r in rows]


def _alive(tx: Tx) -> sa.ColumnElement[bool]:
    return sa.and_(workers.c.seen_clock == tx.lease_clock, workers.c.seen_until > tx.lease_now)
