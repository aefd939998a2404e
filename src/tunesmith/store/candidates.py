"""Candidates: the experiences of a profile that a dataset may be assembled from, each with the correction it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.classification import screens_of
from tunesmith.domain.experience import ExperienceClass, ExperienceState
from tunesmith.domain.learning import CorrectionState, ReviewDecision
from tunesmith.store.database import Tx
from tunesmith.store.learning_tables import corrections
from tunesmith.store.tables import assessments, experiences, feedback, heldout_cases

_MOST_AT_ONCE = 500  # parameters of one statement


@dataclass(frozen=True, slots=True)
class StoredCandidate:
    seq: int
    id: str
    messages: list[dict[str, Any]]
    state: ExperienceState
    class_name: ExperienceClass
    reasons: tuple[str, ...]
    adapter_id: str | None
    """The one that learnt from it last."""
    source: str | None
    template: str | None
    task_type: str | None
    captured_at: datetime
    overruled: tuple[str, ...]
    """Screens that suspect something, and that a reviewer has overruled."""
    correction: str | None
    """The answer it should have had: the last word of a person, else the one accepted from a teacher."""
    corrected_by: str | None


def page(tx: Tx, profile: str, after: int, limit: int) -> list[StoredCandidate]:
    """The next ones in the order they were captured in, after a place in it.

    Left out: what is reserved or forgotten, what waits for a review, what is quarantined, what a person rejected.
    """
    wanted = (
        experiences.c.profile == profile,
        experiences.c.seq > after,
        experiences.c.state.in_([ExperienceState.COLLECTED, ExperienceState.CONSUMED]),
        sa.not_(experiences.c.in_review),
        assessments.c.class_name != ExperienceClass.QUARANTINED,
        sa.or_(assessments.c.review.is_(None), assessments.c.review != ReviewDecision.REJECT),
    )
    rows = tx.all(_QUERY.where(*wanted).order_by(experiences.c.seq).limit(limit))
    if not rows:
        return []
    here = (experiences.c.profile == profile, experiences.c.seq.between(rows[0]["seq"], rows[-1]["seq"]))
    return _with_corrections(rows, _corrections(tx, *here))


def by_ids(tx: Tx, ids: Sequence[str]) -> dict[str, StoredCandidate]:
    """These experiences, by id."""
    found: list[StoredCandidate] = []
    for first in range(0, len(ids), _MOST_AT_ONCE):
        here = experiences.c.id.in_(ids[first : first + _MOST_AT_ONCE])
        found += _with_corrections(tx.all(_QUERY.where(here)), _corrections(tx, here))
    return {each.id: each for each in found}


def tally_of_others(tx: Tx, profile: str) -> dict[str, int]:
    """Why experiences of the profile are no candidates, with how many of each."""
    rejected = assessments.c.review == ReviewDecision.REJECT
    why = sa.case(
        (experiences.c.state == ExperienceState.RESERVED, "reserved by another dataset"),
        (experiences.c.state == ExperienceState.FORGOTTEN, "forgotten"),
        (experiences.c.in_review, "waiting for a review"),
        (sa.func.coalesce(rejected, False), "rejected by a reviewer"),
        (assessments.c.class_name == ExperienceClass.QUARANTINED, "quarantined"),
    )
    query = (
        sa.select(why.label("why"), sa.func.count())
        .join(assessments, assessments.c.experience_id == experiences.c.id)
        .where(experiences.c.profile == profile)
        .group_by(sa.text("1"))
    )
    return {str(row[0]): int(row[1]) for row in tx.conn.execute(query) if row[0] is not None}


def held_out_groups(tx: Tx, profile: str) -> set[str]:
    """Every group of prompts that a dataset of the profile has ever held out."""
    query = sa.select(heldout_cases.c.case_id).where(heldout_cases.c.profile == profile).distinct()
    return set(tx.conn.execute(query).scalars())


_QUERY = sa.select(
    experiences.c.seq,
    experiences.c.id,
    experiences.c.messages,
    experiences.c.state,
    experiences.c.adapter_id,
    experiences.c.source,
    experiences.c.template,
    experiences.c.task_type,
    sa.func.coalesce(experiences.c.captured_at, experiences.c.created_at, type_=experiences.c.created_at.type).label(
        "captured_at"
    ),
    assessments.c.class_name,
    assessments.c.reasons,
    assessments.c.review,
    assessments.c.suspicions,
).join(assessments, assessments.c.experience_id == experiences.c.id)


def _corrections(tx: Tx, *here: Any) -> dict[str, tuple[str, str]]:
    """The correction of each experience that has one, and who made it. A person's counts before a teacher's."""
    taught = (
        sa.select(corrections.c.experience_id, corrections.c.answer, corrections.c.teacher)
        .join(experiences, experiences.c.id == corrections.c.experience_id)
        .where(corrections.c.state == CorrectionState.ACCEPTED, *here)
    )
    said = (
        sa.select(feedback.c.experience_id, feedback.c.correction, feedback.c.rater)
        .join(experiences, experiences.c.id == feedback.c.experience_id)
        .where(feedback.c.correction.is_not(None), sa.not_(feedback.c.is_implicit), *here)
        .order_by(feedback.c.seq)
    )
    found: dict[str, tuple[str, str]] = {}
    for query, who in ((taught, "teacher "), (said, "")):
        for experience_id, answer, name in tx.conn.execute(query):
            if answer.strip():
                found[experience_id] = (answer, f"{who}{name}")
    return found


def _with_corrections(rows: Sequence[sa.RowMapping], corrected: dict[str, tuple[str, str]]) -> list[StoredCandidate]:
    found = []
    for row in rows:
        correction, corrected_by = corrected.get(row["id"], (None, None))
        values: dict[str, Any] = {
            **{name: value for name, value in row.items() if name not in ("review", "suspicions")},
            "state": ExperienceState(row["state"]),
            "class_name": ExperienceClass(row["class_name"]),
            "reasons": tuple(row["reasons"]),
            "overruled": screens_of(row["suspicions"]) if row["review"] == ReviewDecision.ACCEPT else (),
        }
        found.append(StoredCandidate(**values, correction=correction, corrected_by=corrected_by))
    return found
