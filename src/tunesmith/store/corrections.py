"""Corrections: what a teacher answered in place of the student, and what became of each attempt."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tunesmith.domain.learning import CorrectionState
from tunesmith.store.database import Tx
from tunesmith.store.learning_tables import corrections

_MOST_AT_ONCE = 500  # parameters of one query


def accepted_of(tx: Tx, ids: Sequence[str]) -> dict[str, str]:
    """The accepted answer of a teacher, by experience, for those of them that have one."""
    found: dict[str, str] = {}
    for first in range(0, len(ids), _MOST_AT_ONCE):
        some = corrections.c.experience_id.in_(ids[first : first + _MOST_AT_ONCE])
        query = sa.select(corrections.c.experience_id, corrections.c.answer)
        rows = tx.conn.execute(query.where(some, corrections.c.state == CorrectionState.ACCEPTED))
        found.update((str(row[0]), str(row[1])) for row in rows)
    return found
