"""The record of what happened: one row per change, with its actor, in the transaction that made the change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.store.columns import Instant, Sequence, metadata
from tunesmith.store.compiled_statements import CompiledStatement, execute_batch, insert_into
from tunesmith.store.database import Tx

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("entity", sa.Text, nullable=False),
    sa.Column("entity_id", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("old_state", sa.Text),
    sa.Column("new_state", sa.Text),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("detail", sa.JSON, nullable=False),
    sa.Column("at", Instant, nullable=False),
    sa.Index("ix_events_entity", "entity", "entity_id", "seq"),
)


_RECORD = CompiledStatement(insert_into(events, "entity entity_id action actor old_state new_state reason detail at"))


@dataclass(frozen=True)
class RecordedEvent:
    seq: int
    entity: str
    entity_id: str
    action: str
    actor: str
    old_state: str | None
    new_state: str | None
    reason: str
    detail: dict[str, Any]
    at: datetime


def record(
    tx: Tx,
    entity: str,
    entity_id: str,
    action: str,
    *,
    actor: str,
    moved: tuple[str | None, str | None] = (None, None),
    reason: str = "",
    detail: dict[str, Any] | None = None,
) -> None:
    """Write one event; `moved` is (old state, new state) where the change moved one."""
    execute_batch(tx, entry(tx, entity, entity_id, action, actor=actor, moved=moved, reason=reason, detail=detail))


def entry(
    tx: Tx,
    entity: str,
    entity_id: str,
    action: str,
    *,
    actor: str,
    moved: tuple[str | None, str | None] = (None, None),
    reason: str = "",
    detail: dict[str, Any] | None = None,
) -> tuple[CompiledStatement, dict[str, Any]]:
    """An event to be written together with the change it tells of."""
    values = {
        "entity": entity,
        "entity_id": entity_id,
        "action": action,
        "actor": actor,
        "old_state": moved[0],
        "new_state": moved[1],
        "reason": reason,
        "detail": detail or {},
        "at": tx.now,
    }
    return _RECORD, values


def record_all(
    tx: Tx,
    entity: str,
    id_column: sa.Column[Any],
    chosen: Any,
    action: str,
    *,
    actor: str,
    moved: tuple[str | None, str | None] = (None, None),
    reason: str = "",
) -> None:
    """One event for each row of a table that is chosen by a condition, in one statement and in the table's order."""
    values = {
        "entity": sa.literal(entity),
        "entity_id": id_column,
        "action": sa.literal(action),
        "actor": sa.literal(actor),
        "old_state": sa.literal(moved[0], sa.Text),
        "new_state": sa.literal(moved[1], sa.Text),
        "reason": sa.literal(reason),
        "detail": sa.literal({}, sa.JSON),
        "at": sa.literal(tx.now, events.c.at.type),
    }
    query = sa.select(*values.values()).select_from(id_column.table).where(chosen).order_by(id_column.table.c.seq)
    tx.run(events.insert().from_select(list(values), query))


def of_entity(tx: Tx, entity: str, entity_id: str) -> list[RecordedEvent]:
    """The history of one thing, oldest first."""
    query = sa.select(events).where(events.c.entity == entity, events.c.entity_id == entity_id).order_by(events.c.seq)
    return [RecordedEvent(**row) for row in tx.all(query)]
