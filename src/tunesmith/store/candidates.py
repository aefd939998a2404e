"""Candidates: the experiences of a profile that a dataset may be assembled from, each with the correction it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.classification import Judgement, screens_of, standing_corrections
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
    rows = _read(tx, _QUERY.where(*wanted).order_by(experiences.c.seq).limit(limit))
    if not rows:
        return []
    here = (experiences.c.profile == profile, experiences.c.seq.between(rows[0][0], rows[-1][0]))
    return _with_corrections(rows, _corrections(tx, *here))


def by_ids(tx: Tx, ids: Sequence[str]) -> dict[str, StoredCandidate]:
    """These experiences, by id."""
    found: list[StoredCandidate] = []
    for first in range(0, len(ids), _MOST_AT_ONCE):
        here = experiences.c.id.in_(ids[first : first + _MOST_AT_ONCE])
        found += _with_corrections(_read(tx, _QUERY.where(here)), _corrections(tx, here))
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


_WHEN = sa.func.coalesce(experiences.c.captured_at, experiences.c.created_at, type_=experiences.c.created_at.type)
_QUERY = sa.select(
    experiences.c.seq,
    experiences.c.id,
    experiences.c.messages,
    experiences.c.state,
    assessments.c.class_name,
    assessments.c.reasons,
    experiences.c.source,
    experiences.c.template,
    experiences.c.task_type,
    _WHEN,
    assessments.c.review,
    assessments.c.suspicions,
).join(assessments, assessments.c.experience_id == experiences.c.id)
"""The columns in the order of `StoredCandidate`, and what a reviewer has overruled follows from the last two."""
_STATES = {state.value: state for state in ExperienceState}
_CLASSES = {name.value: name for name in ExperienceClass}


def _corrections(tx: Tx, *here: Any) -> dict[str, tuple[str, str]]:
    """The correction of each experience that has one, and who made it. A person's counts before a teacher's."""
    taught = (
        sa.select(corrections.c.experience_id, corrections.c.answer, corrections.c.teacher)
        .join(experiences, experiences.c.id == corrections.c.experience_id)
        .where(corrections.c.state == CorrectionState.ACCEPTED, *here)
    )
    found = {
        experience_id: (answer, f"teacher {name}")
        for experience_id, answer, name in tx.conn.execute(taught)
        if answer.strip()
    }
    for experience_id, said in _said(tx, *here).items():
        for standing in standing_corrections(said)[-1:]:
            assert standing.correction is not None
            found[experience_id] = (standing.correction, standing.rater)
    return found


def _said(tx: Tx, *here: Any) -> dict[str, list[Judgement]]:
    """What raters said, oldest first, of each experience that somebody has ever corrected."""
    earlier = feedback.alias()
    is_corrected = sa.exists().where(
        earlier.c.experience_id == feedback.c.experience_id, earlier.c.correction.is_not(None)
    )
    query = (
        sa.select(feedback.c.experience_id, feedback.c.rater, feedback.c.value, feedback.c.correction)
        .join(experiences, experiences.c.id == feedback.c.experience_id)
        .where(sa.not_(feedback.c.is_implicit), is_corrected, *here)
        .order_by(feedback.c.seq)
    )
    found: dict[str, list[Judgement]] = {}
    for experience_id, rater, value, correction in tx.conn.execute(query):
        found.setdefault(experience_id, []).append(Judgement(rater, value, correction=correction))
    return found


def _read(tx: Tx, query: sa.Select[Any]) -> Sequence[Any]:
    """Plain rows: a profile may have millions, and each is looked at."""
    return tx.conn.execute(query).all()


def _with_corrections(rows: Sequence[Any], corrected: dict[str, tuple[str, str]]) -> list[StoredCandidate]:
    found = []
    for *held, state, class_name, reasons, source, template, task_type, captured_at, review, suspicions in rows:
        seq, experience_id, messages = held
        overruled = screens_of(suspicions) if review == ReviewDecision.ACCEPT else ()
        correction, corrected_by = corrected.get(experience_id, (None, None))
        found.append(
            StoredCandidate(
                seq, experience_id, messages, _STATES[state], _CLASSES[class_name], tuple(reasons), source, template,
                task_type, captured_at, overruled, correction, corrected_by,
            )
        )  # fmt: skip
    return found
