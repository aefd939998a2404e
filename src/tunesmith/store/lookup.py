"""Look up one row by its id or by a prefix of it, and move its state if it is still the one that was read."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import NotFound, Refused, UsageError, quoted
from tunesmith.core.ids import is_id
from tunesmith.store.database import Tx


def get_one(tx: Tx, table: sa.Table, row_id: str, *, hint: str = "") -> sa.RowMapping:
    """The row with exactly this id; `hint`: where such ids are listed."""
    row = tx.first(sa.select(table).where(table.c.id == row_id))
    if row is None:
        raise NotFound.named(_kind(table), row_id, hint=hint)
    return row


def move_guarded(tx: Tx, table: sa.Table, row_id: str, old: str, **values: Any) -> None:
    """Write these values, a new `state` among them; raises Refused if the row has left the state `old` meanwhile."""
    if tx.run(table.update().where(table.c.id == row_id, table.c.state == old).values(**values)) != 1:
        raise Refused(f"{_kind(table)} {row_id} moved on meanwhile; look again")


def find_one(tx: Tx, table: sa.Table, prefix: str, text: str) -> sa.RowMapping:
    """A row by id or by an unambiguous beginning of its id, as people type them."""
    if not is_id(text):
        raise UsageError(f"{quoted(text)} is no {_kind(table)} id; they look like {prefix}-4t9kq2m7x1bz")
    rows = tx.all(sa.select(table).where(table.c.id.startswith(text, autoescape=True)).order_by(table.c.id).limit(3))
    exact = [row for row in rows if row["id"] == text]
    if exact or len(rows) == 1:
        return (exact or rows)[0]
    if rows:
        raise UsageError(f"{quoted(text)} is the beginning of several ids: {', '.join(row['id'] for row in rows)}")
    raise NotFound.named(_kind(table), text)


def _kind(table: sa.Table) -> str:
    return table.name.removesuffix("s").replace("_", "-")
