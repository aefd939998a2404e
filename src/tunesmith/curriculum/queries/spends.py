"""Spends: money is reserved before a call with the most it may cost, and settled after it with what it did cost.

Amounts are whole millionths of the currency of the prices, so that sums are exact. What is reserved counts as spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy import exc

from tunesmith.core.errors import Conflict, Refused
from tunesmith.core.ids import next_id
from tunesmith.curriculum.queries import cycles
from tunesmith.curriculum.rules.cycle import SpendState, Spent, refusal_of_spend
from tunesmith.curriculum.tables import spends
from tunesmith.profiles.sections.curriculum import SpendLimits
from tunesmith.store import events
from tunesmith.store.database import Tx, broke


class OverBudget(Refused):
    """The most that the call may cost does not fit into what is left."""

    code = "over_budget"


@dataclass(frozen=True)
class Charge:
    """What money is wanted for."""

    profile: str
    purpose: str
    cycle_id: str
    entity_id: str
    amount: int
    """The most it may cost, in millionths."""


def reserve(tx: Tx, charge: Charge, limits: SpendLimits) -> str:
    """Set the money aside, or raise OverBudget; nobody else reserves for this profile until the transaction ends."""
    cycles.lock_profile(tx, charge.profile)
    why = refusal_of_spend(charge.amount, spent(tx, charge.profile, charge.purpose, charge.cycle_id), limits)
    if why is not None:
        raise OverBudget(why)
    spend_id = next_id("sp")
    try:
        tx.run(
            spends.insert().values(
                id=spend_id, state=SpendState.RESERVED, created_at=tx.now, settled_at=None, **vars(charge)
            )
        )
    except exc.IntegrityError as error:
        if broke(error, "uq_spends_one_open", "spends.purpose"):
            raise Conflict(f"{charge.entity_id} is being paid for by another {charge.purpose}; look again") from error
        raise
    return spend_id


def settle(tx: Tx, spend_id: str, amount: int | None) -> int:
    """What it did cost; None: nobody knows, so all that was reserved counts. What was settled before stays as it is."""
    amounts = {} if amount is None else {"amount": amount}
    mine = (spends.c.id == spend_id, spends.c.state == SpendState.RESERVED)
    tx.run(spends.update().where(*mine).values(state=SpendState.SETTLED, settled_at=tx.now, **amounts))
    row = tx.first(sa.select(spends.c.amount).where(spends.c.id == spend_id))
    assert row is not None, spend_id
    return int(row["amount"])


def settle_abandoned(tx: Tx, older_than: timedelta, *, actor: str) -> int:
    """Whoever reserved these is gone, and may have been billed: all of it counts as spent. How many there were."""
    is_reserved = sa.text("state = 'reserved'")  # spelt out, so that the partial index serves it
    query = sa.select(spends).where(is_reserved, spends.c.created_at < tx.now - older_than)
    rows = tx.all(query.with_for_update(skip_locked=True))
    for row in rows:
        amount = settle(tx, row["id"], None)
        reason = f"nobody settled it, so all that was reserved counts as spent ({amount} millionths)"
        events.record(tx, "profile", row["profile"], "spend_abandoned", actor=actor, reason=reason)
    return len(rows)


def spent(tx: Tx, profile: str, purpose: str, cycle_id: str | None) -> Spent:
    """What is spent or reserved: in a cycle, and in this calendar month (UTC)."""
    mine = (spends.c.profile == profile, spends.c.purpose == purpose)
    this_month = (*mine, spends.c.created_at >= month_of(tx.now))
    this_cycle = (*mine, spends.c.cycle_id == cycle_id)
    return Spent(cycle=0 if cycle_id is None else _sum(tx, *this_cycle), month=_sum(tx, *this_month))


def spent_since(tx: Tx, profile: str, since: datetime) -> int:
    """What teachers of a profile have cost since then, whatever for."""
    return _sum(tx, spends.c.profile == profile, spends.c.created_at >= since)


def num_in_cycle(tx: Tx, cycle_id: str) -> int:
    """How many calls a cycle has paid for, over all its attempts."""
    query = sa.select(sa.func.count()).select_from(spends).where(spends.c.cycle_id == cycle_id)
    return int(tx.conn.execute(query).scalar_one())


def month_of(now: datetime) -> datetime:
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _sum(tx: Tx, *where: sa.ColumnElement[bool]) -> int:
    query = sa.select(sa.func.coalesce(sa.func.sum(spends.c.amount), 0)).where(*where)
    return int(tx.conn.execute(query).scalar_one())
