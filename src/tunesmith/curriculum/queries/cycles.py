"""Cycles of the curriculum: when one began, what came of it, and whether one is open. They are told as events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.profiles.tables import profiles
from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.tables import tasks
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.events import events as events_table

_BEGAN, _ENDED = "curriculum_began", "curriculum_ended"


@dataclass(frozen=True)
class CycleRecord:
    id: str
    began_at: datetime
    ended_at: datetime | None
    """None: it is under way, or was killed."""
    summary: str


def lock_profile(tx: Tx, profile: str) -> None:
    """Whoever else spends, or opens a cycle, for this profile waits until this transaction ends."""
    if tx.is_postgres:  # on SQLite every writing transaction is alone; captures need no more than the row's key
        tx.first(sa.select(profiles.c.name).where(profiles.c.name == profile).with_for_update(key_share=True))


def begin(tx: Tx, profile: str, cycle_id: str, *, actor: str) -> None:
    events.record(tx, "profile", profile, _BEGAN, actor=actor, detail={"cycle": cycle_id})


def end(tx: Tx, profile: str, cycle_id: str, *, actor: str, summary: str, counts: dict[str, Any]) -> None:
    detail = {"cycle": cycle_id, **counts}
    events.record(tx, "profile", profile, _ENDED, actor=actor, reason=summary, detail=detail)


def last(tx: Tx, profile: str) -> CycleRecord | None:
    """The one that began last."""
    began = _newest(tx, profile, _BEGAN)
    if began is None:
        return None
    ended = _newest(tx, profile, _ENDED)
    is_over = ended is not None and ended["detail"].get("cycle") == began["detail"].get("cycle")
    return CycleRecord(
        id=str(began["detail"].get("cycle")),
        began_at=began["at"],
        ended_at=ended["at"] if ended is not None and is_over else None,
        summary=str(ended["reason"]) if ended is not None and is_over else "",
    )


def _newest(tx: Tx, profile: str, action: str) -> sa.RowMapping | None:
    mine = (events_table.c.entity == "profile", events_table.c.entity_id == profile, events_table.c.action == action)
    return tx.first(sa.select(events_table).where(*mine).order_by(events_table.c.seq.desc()).limit(1))


def is_open(tx: Tx, profile: str) -> bool:
    """Whether a task for a cycle of this profile waits or is under way."""
    mine = (tasks.c.kind == TaskKind.CURRICULUM, tasks.c.profile == profile)
    return tx.first(sa.select(tasks.c.id).where(sa.text("state IN ('waiting', 'leased')"), *mine).limit(1)) is not None
