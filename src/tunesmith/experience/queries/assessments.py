"""Assessments: what verifiers and raters think of an experience, and the class that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import NotFound
from tunesmith.experience.rules.classes import Assessment
from tunesmith.experience.rules.experience import ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.experience.rules.feedback import Feedback
from tunesmith.experience.tables import assessments, experiences
from tunesmith.store import events
from tunesmith.store.compiled_statements import CompiledStatement, insert_into
from tunesmith.store.database import Tx
from tunesmith.verifiers.base import Finding

_ADD = CompiledStatement(
    insert_into(assessments, "experience_id profile findings suspicions assessed_at class_name reasons feedback")
)


def add(tx: Tx, experience_id: str, profile: str, assessment: Assessment) -> None:
    """The first assessment of an experience, in the transaction that stores it."""
    _ADD.run(
        tx,
        experience_id=experience_id,
        profile=profile,
        findings={name: vars(finding) for name, finding in assessment.findings.items()},
        suspicions=list(assessment.suspicions),
        assessed_at=tx.now,
        **_decided(assessment),
    )


def decide(tx: Tx, experience_id: str, new: Assessment, *, actor: str) -> None:
    """The one setter of an experience's class, feedback and review; tells it as an event where the class moved."""
    old = get(tx, experience_id)
    tx.run(
        assessments.update()
        .where(assessments.c.experience_id == experience_id)
        .values(assessed_at=tx.now, review=new.review, **_decided(new))
    )
    if new.class_name is not old.class_name:
        detail = {"from": old.class_name, "to": new.class_name, "reasons": list(new.reasons)}
        reason = f"{old.class_name} is now {new.class_name}: {'; '.join(new.reasons)}"
        events.record(tx, "experience", experience_id, "classified", actor=actor, reason=reason, detail=detail)


def _decided(assessment: Assessment) -> dict[str, Any]:
    return {
        "class_name": assessment.class_name,
        "reasons": list(assessment.reasons),
        "feedback": vars(assessment.feedback),
    }


def get(tx: Tx, experience_id: str) -> Assessment:
    row = tx.first(sa.select(assessments).where(assessments.c.experience_id == experience_id))
    if row is None:
        raise NotFound.named("experience", experience_id)
    return from_row(row)


def tally(tx: Tx, profile: str | None) -> list[tuple[str, str, str, int]]:
    """How many there are by profile, state and class."""
    judged = assessments
    keys = (experiences.c.profile, experiences.c.state, judged.c.class_name)
    query = sa.select(*keys, sa.func.count()).join(judged, judged.c.experience_id == experiences.c.id)
    if profile is not None:
        query = query.where(experiences.c.profile == profile)
    return [(row[0], row[1], row[2], int(row[3])) for row in tx.conn.execute(query.group_by(*keys).order_by(*keys))]


def num_corrected(tx: Tx, profile: str | None) -> dict[str, int]:
    """By profile: how many experiences have a correction of a person that stands."""
    query = (
        sa.select(assessments.c.profile, sa.func.count())
        .join(experiences, experiences.c.id == assessments.c.experience_id)
        .where(assessments.c.feedback["num_corrections"].as_integer() > 0)
        .where(experiences.c.state != ExperienceState.FORGOTTEN)  # a tombstone keeps the figures, and no correction
    )
    if profile is not None:
        query = query.where(assessments.c.profile == profile)
    return {row[0]: int(row[1]) for row in tx.conn.execute(query.group_by(assessments.c.profile))}


def from_row(row: Mapping[Any, Any]) -> Assessment:
    return Assessment(
        findings={name: Finding(**said) for name, said in row["findings"].items()},
        suspicions=tuple(row["suspicions"]),
        feedback=Feedback(**row["feedback"]),
        class_name=ExperienceClass(row["class_name"]),
        reasons=tuple(row["reasons"]),
        review=None if row["review"] is None else ReviewDecision(row["review"]),
    )
