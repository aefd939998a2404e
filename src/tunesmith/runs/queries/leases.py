"""Who may change what: the holder of a lease, or a person while nobody holds one."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tunesmith.runs.tables import tasks


@dataclass(frozen=True)
class Lease:
    """Proof of owning a task: valid while the task's row still carries this token."""

    task_id: str
    attempt_id: str
    token: str


def holds(lease: Lease) -> sa.ColumnElement[bool]:
    """True in SQL while the lease is the task's current one."""
    return sa.exists().where(tasks.c.id == lease.task_id, tasks.c.state == "leased", tasks.c.lease_token == lease.token)


def nothing_open(run_id: str) -> sa.ColumnElement[bool]:
    """True in SQL while no task of this run waits or is leased."""
    return ~sa.exists().where(tasks.c.run_id == run_id, sa.text("tasks.state IN ('waiting', 'leased')"))


def nobody_holds(run_id: str) -> sa.ColumnElement[bool]:
    """True in SQL while no worker has leased a task of this run."""
    return ~sa.exists().where(tasks.c.run_id == run_id, tasks.c.state == "leased")
