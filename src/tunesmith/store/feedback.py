"""Feedback: what raters say about an experience, one row each time; nothing is ever overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.classification import Judgement
from tunesmith.ids import next_id
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.tables import feedback


@dataclass(frozen=True)
class StoredFeedback:
    id: str
    experience_id: str
    rater: str
    value: float | None
    is_implicit: bool
    confidence: float
    comment: str | None
    correction: str | None
    created_at: datetime


def add(tx: Tx, experience_id: str, judgement: Judgement, *, actor: str) -> tuple[str, bool]:
    """Store what a rater says; its id, and whether it is news. Hold the experience's lock.

    What a rater has said last, said again, is the same feedback: a call that is tried again changes nothing.
    """
    said = vars(judgement)
    last = tx.first(
        sa.select(feedback)
        .where(feedback.c.experience_id == experience_id, feedback.c.rater == judgement.rater)
        .order_by(feedback.c.seq.desc())
        .limit(1)
    )
    if last is not None and all(last[name] == value for name, value in said.items()):
        return str(last["id"]), False
    feedback_id = next_id("fb")
    tx.run(feedback.insert().values(id=feedback_id, experience_id=experience_id, created_at=tx.now, **said))
    detail: dict[str, Any] = {"feedback": feedback_id, "rater": judgement.rater, "value": judgement.value}
    action = "complained" if judgement.is_implicit else "rated"
    events.record(tx, "experience", experience_id, action, actor=actor, detail=detail)
    return feedback_id, True


def of_experience(tx: Tx, experience_id: str) -> list[StoredFeedback]:
    """Everything said about an experience, oldest first."""
    query = sa.select(feedback).where(feedback.c.experience_id == experience_id).order_by(feedback.c.seq)
    return [StoredFeedback(**{name: value for name, value in row.items() if name != "seq"}) for row in tx.all(query)]
