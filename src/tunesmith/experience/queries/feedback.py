"""Feedback: what raters say about an experience, one row each time; nothing is ever overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import Refused
from tunesmith.core.ids import next_id
from tunesmith.experience.rules.feedback import Rating
from tunesmith.experience.tables import experiences, feedback
from tunesmith.store import events
from tunesmith.store.database import Tx

MAX_OF_ONE_KEY = 100


@dataclass(frozen=True, kw_only=True)
class StoredFeedback(Rating):
    """A rating, with when it was heard and under which id."""

    id: str
    experience_id: str
    created_at: datetime


def add(tx: Tx, experience_id: str, rating: Rating, *, actor: str) -> tuple[str, bool]:
    """Store what a rater says; its id, and whether it is news. Hold the experience's lock.

    What a rater has said last, said again, is the same feedback: a call that is tried again changes nothing. One API
    key says at most so much about one experience, under however many rater names.
    """
    said = vars(rating)
    heard = of_experience(tx, experience_id)
    last = next((each for each in reversed(heard) if each.speaker == rating.speaker), None)
    if last is not None and all(getattr(last, name) == value for name, value in said.items() if name != "rater"):
        return last.id, False
    num_said = sum(each.key_label == rating.key_label for each in heard)
    if rating.key_label is not None and not rating.is_implicit and num_said >= MAX_OF_ONE_KEY:
        raise Refused(
            f"this API key has said {MAX_OF_ONE_KEY} things about experience {experience_id} already, and no more "
            "is taken; use `tunesmith feedback add` where it is served"
        )
    feedback_id = next_id("fb")
    tx.run(feedback.insert().values(id=feedback_id, experience_id=experience_id, created_at=tx.now, **said))
    detail: dict[str, Any] = {"feedback": feedback_id, "rater": rating.said_by, "value": rating.value}
    action = "complained" if rating.is_implicit else "rated"
    events.record(tx, "experience", experience_id, action, actor=actor, detail=detail)
    return feedback_id, True


def of_experience(tx: Tx, experience_id: str) -> list[StoredFeedback]:
    """Everything said about an experience, oldest first."""
    query = sa.select(feedback).where(feedback.c.experience_id == experience_id).order_by(feedback.c.seq)
    return [StoredFeedback(**{name: value for name, value in row.items() if name != "seq"}) for row in tx.all(query)]


def tally(tx: Tx, profile: str | None) -> dict[str, tuple[int, float | None]]:
    """By profile: how many experiences somebody has rated, and the mean of everything said."""
    num = sa.func.count(sa.distinct(feedback.c.experience_id))
    query = (
        sa.select(experiences.c.profile, num, sa.func.avg(feedback.c.value))
        .join(experiences, experiences.c.id == feedback.c.experience_id)
        .where(sa.not_(feedback.c.is_implicit), feedback.c.value.is_not(None))
        .group_by(experiences.c.profile)
    )
    if profile is not None:
        query = query.where(experiences.c.profile == profile)
    return {row[0]: (int(row[1]), None if row[2] is None else float(row[2])) for row in tx.conn.execute(query)}
