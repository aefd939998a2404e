"""Corrections: what a teacher answered in place of the student, and what became of each attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.core.ids import next_id
from tunesmith.curriculum.rules.cycle import Entry
from tunesmith.experience.rules.experience import CorrectionState, ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.experience.tables import assessments, corrections, experiences, reviews
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.verifiers.base import Finding

_ACTIONS = {
    CorrectionState.ACCEPTED: "corrected",
    CorrectionState.REFUSED: "correction_refused",
    CorrectionState.FAILED: "correction_failed",
}


@dataclass(frozen=True)
class Correction:
    """One attempt of a teacher at one experience."""

    teacher: str
    state: CorrectionState
    reason: str
    answer: str | None
    findings: Mapping[str, Finding]
    counts: bool
    """Whether it counts against the attempts that are allowed."""


@dataclass(frozen=True)
class StoredCorrection(Correction):
    id: str
    experience_id: str
    number: int
    created_at: datetime


def add(tx: Tx, experience_id: str, profile: str, said: Correction, *, actor: str, paid_by: str | None) -> None:
    """Store what came of an attempt, and tell it in the experience's history. Hold the experience's lock.

    It is named after the spend that paid for it, so that a transaction that is tried again stores it once; None: nobody
    was asked.
    """
    number = num_of(tx, experience_id) + 1
    correction_id = next_id("cor") if paid_by is None else f"cor-{paid_by.partition('-')[2]}"
    if tx.first(sa.select(corrections.c.id).where(corrections.c.id == correction_id)) is not None:
        return
    values: dict[str, Any] = {**vars(said), "findings": {name: vars(each) for name, each in said.findings.items()}}
    tx.run(
        corrections.insert().values(
            id=correction_id,
            experience_id=experience_id,
            profile=profile,
            number=number,
            created_at=tx.now,
            **values,
        )
    )
    events.record(
        tx, "experience", experience_id, _ACTIONS[said.state], actor=actor,
        reason=f"teacher {said.teacher}: {said.reason}", detail={"correction": correction_id, "number": number},
    )  # fmt: skip


def num_of(tx: Tx, experience_id: str) -> int:
    """How many attempts there were at an experience."""
    query = sa.select(sa.func.count()).select_from(corrections).where(corrections.c.experience_id == experience_id)
    return int(tx.conn.execute(query).scalar_one())


def of_experience(tx: Tx, experience_id: str) -> list[StoredCorrection]:
    """Every attempt at an experience, oldest first."""
    query = sa.select(corrections).where(corrections.c.experience_id == experience_id).order_by(corrections.c.seq)
    return [
        StoredCorrection(
            **{
                **{name: row[name] for name in StoredCorrection.__dataclass_fields__},
                "state": CorrectionState(row["state"]),
                "findings": {name: Finding(**said) for name, said in row["findings"].items()},
            }
        )
        for row in tx.all(query)
    ]


def entry(tx: Tx, profile: str, experience_id: str) -> Entry | None:
    """The experience as an entry; None: it is none, or no longer one."""
    return next(iter(list(entries(tx, profile, experience_id))), None)


def entries(tx: Tx, profile: str, only: str | None = None) -> Iterator[Entry]:
    """What needs improvement and nobody has corrected: not reserved, not in review, not refused by a reviewer."""
    tried, judged = _tried(profile, only), assessments
    columns = (
        experiences.c.id, experiences.c.seq, experiences.c.served_by, judged.c.findings, judged.c.feedback,
        judged.c.suspicions, tried.c.num, tried.c.counted, tried.c.last_at,
    )  # fmt: skip
    query = (
        sa.select(*columns)
        .join(judged, judged.c.experience_id == experiences.c.id)
        .outerjoin(tried, tried.c.experience_id == experiences.c.id)
        .where(
            judged.c.profile == profile,
            judged.c.class_name == ExperienceClass.NEEDS_IMPROVEMENT,
            sa.or_(judged.c.review.is_(None), judged.c.review != ReviewDecision.REJECT),
            experiences.c.state == ExperienceState.COLLECTED,
            sa.not_(experiences.c.in_review),
            sa.func.coalesce(tried.c.accepted, 0) == 0,
        )
    )
    if only is not None:
        query = query.where(experiences.c.id == only)
    rows = tx.conn.execute(query.execution_options(yield_per=1000))
    try:
        for row in rows.mappings():
            if row["feedback"].get("num_corrections"):  # by those whose last word it still is
                continue
            yield Entry(
                id=row["id"],
                seq=row["seq"],
                findings={name: Finding(**said) for name, said in row["findings"].items()},
                feedback_mean=row["feedback"].get("mean"),
                num_attempts=int(row["num"] or 0),
                num_counted=int(row["counted"] or 0),
                last_attempt_at=row["last_at"],
                is_suspect=bool(row["suspicions"]),
                served_by=row["served_by"],
            )
    finally:
        rows.close()


def _tried(profile: str, only: str | None) -> sa.Subquery:
    """By experience: how often teachers were asked; since the last review: how often that counts, and when last."""
    mine = [corrections.c.profile == profile] if only is None else [corrections.c.experience_id == only]
    its = [] if only is None else [reviews.c.experience_id == only]
    reviewed = (
        sa.select(reviews.c.experience_id, sa.func.max(reviews.c.created_at).label("at"))
        .where(*its)
        .group_by(reviews.c.experience_id)
        .subquery()
    )
    is_recent = sa.or_(reviewed.c.at.is_(None), corrections.c.created_at > reviewed.c.at)
    accepted = corrections.c.state == CorrectionState.ACCEPTED
    return (
        sa.select(
            corrections.c.experience_id,
            sa.func.count().label("num"),
            sa.func.sum(sa.case((sa.and_(corrections.c.counts, is_recent), 1), else_=0)).label("counted"),
            sa.func.sum(sa.case((accepted, 1), else_=0)).label("accepted"),
            sa.func.max(sa.case((is_recent, corrections.c.created_at))).label("last_at"),
        )
        .outerjoin(reviewed, reviewed.c.experience_id == corrections.c.experience_id)
        .where(*mine)
        .group_by(corrections.c.experience_id)
        .subquery()
    )
