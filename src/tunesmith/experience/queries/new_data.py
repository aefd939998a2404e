"""What a trigger depends on: how much could be learnt that never was, and how good the answers of what is live are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.experience.queries.candidates import serving_history
from tunesmith.experience.rules.experience import CorrectionState, ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.experience.tables import assessments, corrections, experiences
from tunesmith.store.database import Tx
from tunesmith.triggers.base import LiveQuality, NewData

_SILENCE = 0.5
"""What an answer counts that is gold because nobody complained."""
_QUALITY = {ExperienceClass.GOLD: 1.0, ExperienceClass.AMBIGUOUS: 0.5, ExperienceClass.NEEDS_IMPROVEMENT: 0.0}
_happened_at = sa.func.coalesce(
    experiences.c.captured_at, experiences.c.created_at, type_=experiences.c.created_at.type
)
_HAS_TEACHERS_ANSWER = sa.exists().where(
    corrections.c.experience_id == experiences.c.id, corrections.c.state == CorrectionState.ACCEPTED
)
_MEAN = assessments.c.feedback["mean"].as_float()
_NUM_CORRECTIONS = assessments.c.feedback["num_corrections"].as_integer()


def new_data(
    tx: Tx, profile: str, *, trusts_base: bool, needs_correction: bool = False, task_types: Sequence[str] = ()
) -> NewData:
    """Experiences that an assembly could choose as new ones, whatever split their prompt is in.

    Reads no text, and only what is gold or corrected: this is asked every minute.
    """
    is_corrected = sa.or_(_NUM_CORRECTIONS > 0, _HAS_TEACHERS_ANSWER)
    is_gold = assessments.c.class_name == ExperienceClass.GOLD
    wanted = [
        experiences.c.profile == profile,
        experiences.c.state == ExperienceState.COLLECTED,
        sa.not_(experiences.c.in_review),
        assessments.c.class_name != ExperienceClass.QUARANTINED,
        sa.or_(assessments.c.review.is_(None), assessments.c.review != ReviewDecision.REJECT),
        is_corrected if needs_correction else sa.or_(is_gold, is_corrected),
    ]
    if task_types:
        wanted.append(experiences.c.task_type.in_(task_types))
    query = (
        sa.select(
            _happened_at.label("at"), experiences.c.served_by, experiences.c.key_label, assessments.c.review,
            is_corrected.label("is_corrected"), _MEAN.label("mean"),
        )
        .join(assessments, assessments.c.experience_id == experiences.c.id)
        .where(*wanted)
    )  # fmt: skip
    history = serving_history(tx, profile, trusts_base=trusts_base)
    num, weight, oldest = 0, 0.0, None
    for row in tx.conn.execute(query):
        is_silent = row.mean is None and row.review != ReviewDecision.ACCEPT and not row.is_corrected
        if is_silent and history.exclusion(row.served_by, row.at, is_served=row.key_label is not None) is not None:
            continue
        num += 1
        weight += _SILENCE if is_silent else 1.0 if row.is_corrected or row.mean is None else row.mean
        oldest = row.at if oldest is None else min(oldest, row.at)
    return NewData(num, weight, oldest)


def live_quality(tx: Tx, profile: str, version: str, since: datetime, *, window: int, num_audits: int) -> LiveQuality:
    """Quality of the answers of a version since it went live: of the first window, and of the last complete ones."""
    answers = (
        experiences.c.profile == profile,
        experiences.c.seq >= first_since(tx, profile, since),
        experiences.c.state != ExperienceState.FORGOTTEN,
        assessments.c.class_name != ExperienceClass.QUARANTINED,
        # an application that captures by itself may not say which version answered
        sa.or_(experiences.c.served_by == version, sa.and_(experiences.c.served_by.is_(None), _happened_at >= since)),
    )
    counted = sa.select(sa.func.count()).select_from(_JUDGED).where(*answers)
    num = int(tx.conn.execute(counted).scalar_one())
    if num < window:
        return LiveQuality()
    complete = num // window
    first = max(1, complete - num_audits)
    audits = tuple(_mean(tx, answers, place * window, window) for place in range(first, complete))
    return LiveQuality(_mean(tx, answers, 0, window), audits)


_JUDGED = experiences.join(assessments, assessments.c.experience_id == experiences.c.id)
_WORTH = sa.case(*((assessments.c.class_name == name, worth) for name, worth in _QUALITY.items()), else_=0.0)


def _mean(tx: Tx, answers: Sequence[Any], offset: int, window: int) -> float:
    chosen = sa.select(_WORTH.label("worth")).select_from(_JUDGED).where(*answers).order_by(experiences.c.seq)
    some = chosen.offset(offset).limit(window).subquery()
    return float(tx.conn.execute(sa.select(sa.func.avg(some.c.worth))).scalar_one())


def first_since(tx: Tx, profile: str, since: datetime) -> int:
    """The first place in the order of capture at or after a time, by halving: there is no index over times."""
    low = 0
    high = int(tx.conn.execute(sa.select(sa.func.coalesce(sa.func.max(experiences.c.seq), 0))).scalar_one()) + 1
    while low < high:
        middle = (low + high) // 2
        mine = (experiences.c.profile == profile, experiences.c.seq >= middle)
        query = sa.select(experiences.c.seq, experiences.c.created_at).where(*mine).order_by(experiences.c.seq).limit(1)
        row = tx.first(query)
        if row is None or row["created_at"] >= since:
            high = middle
        else:
            low = int(row["seq"]) + 1
    return low
