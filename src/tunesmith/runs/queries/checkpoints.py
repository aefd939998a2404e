"""Checkpoints that a run may be resumed from; registered by the attempt that wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tunesmith.runs.queries import tasks
from tunesmith.runs.queries.leases import Lease
from tunesmith.runs.tables import checkpoints
from tunesmith.store.database import Tx


@dataclass(frozen=True)
class Checkpoint:
    seq: int
    run_id: str
    attempt_id: str
    step: int
    path: str
    digest: str
    kinds: tuple[str, ...]
    created_at: datetime


def register(tx: Tx, lease: Lease, run_id: str, *, step: int, path: str, digest: str, kinds: Sequence[str]) -> None:
    """Note a published checkpoint of our attempt; the same one twice is one."""
    tasks.require_lease(tx, lease)
    key = {"attempt_id": lease.attempt_id, "path": path}
    tx.upsert(checkpoints, key, run_id=run_id, step=step, digest=digest, kinds=list(kinds), created_at=tx.now)


def of_run(tx: Tx, run_id: str) -> list[Checkpoint]:
    """Furthest first; of equal steps the newest."""
    query = (
        sa.select(checkpoints)
        .where(checkpoints.c.run_id == run_id)
        .order_by(checkpoints.c.step.desc(), checkpoints.c.seq.desc())
    )
    return [Checkpoint(**{**row, "kinds": tuple(row["kinds"])}) for row in tx.all(query)]
