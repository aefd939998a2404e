"""Leases on work that belongs to no task: whoever holds the scheduler's looks for rounds to open."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tunesmith.core.errors import LeaseLost
from tunesmith.core.ids import new_token
from tunesmith.runs.tables import scheduler_leases as leases
from tunesmith.store.database import Tx


@dataclass(frozen=True)
class SchedulerLease:
    """Valid while the row carries this token and its time has not run out."""

    name: str
    token: str


def take(tx: Tx, name: str, holder: str, lease_s: float, mine: SchedulerLease | None = None) -> SchedulerLease | None:
    """Take the lease if nobody holds it, or it is mine, or its holder's time ran out; None: another one holds it."""
    row = tx.first(sa.select(leases).where(leases.c.name == name).with_for_update())
    token = new_token()
    values = {"token": token, "holder": holder, "lease_clock": tx.lease_clock, "lease_until": tx.lease_now + lease_s}
    if row is None:
        return SchedulerLease(name, token) if tx.insert_if_absent(leases, name=name, **values) else None
    is_mine = mine is not None and row["token"] == mine.token
    has_expired = row["lease_clock"] != tx.lease_clock or row["lease_until"] <= tx.lease_now
    if not is_mine and not has_expired:
        return None
    tx.run(leases.update().where(leases.c.name == name).values(**values))
    return SchedulerLease(name, token)


def require(tx: Tx, lease: SchedulerLease) -> None:
    """Raise LeaseLost unless it still holds; until the transaction ends nobody can take it."""
    mine = (leases.c.name == lease.name, leases.c.token == lease.token)
    row = tx.first(sa.select(leases).where(*mine).with_for_update())
    if row is None or row["lease_clock"] != tx.lease_clock or row["lease_until"] <= tx.lease_now:
        raise LeaseLost(f"the lease of the {lease.name} ran out; nothing was changed, its next holder looks again")


def renew(tx: Tx, lease: SchedulerLease, lease_s: float) -> None:
    """Hold it for as long again; raises LeaseLost if it ran out."""
    require(tx, lease)
    until = {"lease_clock": tx.lease_clock, "lease_until": tx.lease_now + lease_s}
    tx.run(leases.update().where(leases.c.name == lease.name, leases.c.token == lease.token).values(**until))


def release(tx: Tx, lease: SchedulerLease) -> None:
    """Give it back, if it is still ours."""
    tx.run(leases.delete().where(leases.c.name == lease.name, leases.c.token == lease.token))
