"""Look up one row by its id, by a prefix of it, or by name."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.core.errors import NotFound, UsageError, quoted
from tunesmith.core.ids import is_id
from tunesmith.store.database import Tx


def find_one(tx: Tx, table: sa.Table, prefix: str, text: str) -> sa.RowMapping:
    """A row by id or by an unambiguous beginning of its id, as people type them."""
    if not is_id(text):
        raise UsageError(
            f"{quoted(text)} is no {table.name.removesuffix('s')} id; they look like {prefix}-4t9kq2m7x1bz"
        )
    rows = tx.all(sa.select(table).where(table.c.id.startswith(text, autoescape=True)).order_by(table.c.id).limit(3))
    exact = [row for row in rows if row["id"] == text]
    if exact or len(rows) == 1:
        return (exact or rows)[0]
    if rows:
        raise UsageError(f"{quoted(text)} is the beginning of several ids: {', '.join(row['id'] for row in rows)}")
    raise NotFound.named(table.name.removesuffix("s"), text)
