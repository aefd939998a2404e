"""Switches for the whole store; the only one so far is the e-stop."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tunesmith.runs.tables import switches
from tunesmith.store import events
from tunesmith.store.database import Tx

ESTOP = "estop"


@dataclass(frozen=True)
class Switch:
    is_on: bool
    actor: str
    reason: str
    moved_at: datetime | None


def is_on(tx: Tx, name: str) -> bool:
    return show(tx, name).is_on


def show(tx: Tx, name: str) -> Switch:
    row = tx.first(sa.select(switches).where(switches.c.name == name))
    if row is None:
        return Switch(False, "", "never used", None)
    return Switch(row["is_on"], row["actor"], row["reason"], row["moved_at"])


def turn(tx: Tx, name: str, on: bool, *, actor: str, reason: str) -> None:
    """Turn a switch on or off; saying it twice changes nothing but the reason."""
    tx.upsert(switches, {"name": name}, is_on=on, actor=actor, reason=reason, moved_at=tx.now)
    events.record(tx, "switch", name, "on" if on else "off", actor=actor, reason=reason)
