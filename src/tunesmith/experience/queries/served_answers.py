"""Answers of one version before and after a flip, as the watch compares them: scores and ratings, no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.experience.queries.new_data import first_since
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.tables import assessments, experiences
from tunesmith.store.database import Tx
from tunesmith.verifiers.base import UNFINISHED


@dataclass(frozen=True)
class ServedAnswer:
    scores: Mapping[str, float | None]
    """By verifier; None where it does not apply to this answer."""
    rating: float | None
    """The mean of what people said explicitly."""
    is_finished: bool


def newest_before(
    tx: Tx, profile: str, version: str, flipped_at: datetime, *, since: datetime, limit: int
) -> list[ServedAnswer]:
    """The newest answers of a version that were stored before a flip, and not before `since`."""
    place = first_since(tx, profile, flipped_at)
    chosen = _of_version(profile, version).where(experiences.c.seq < place).order_by(experiences.c.seq.desc())
    return [_answer(row) for row in tx.all(chosen.limit(limit)) if since <= row["created_at"] < flipped_at]


def first_after(tx: Tx, profile: str, version: str, flipped_at: datetime, *, limit: int) -> list[ServedAnswer]:
    """The first answers of a version that were stored since a flip."""
    place = first_since(tx, profile, flipped_at)
    chosen = _of_version(profile, version).where(experiences.c.seq >= place).order_by(experiences.c.seq)
    return [_answer(row) for row in tx.all(chosen.limit(limit))]


def _of_version(profile: str, version: str) -> sa.Select[Any]:
    """Only answers that name their version: an experience without one may be an example that a person wrote."""
    return (
        sa.select(experiences.c.created_at, assessments.c.findings, assessments.c.feedback)
        .join(assessments, assessments.c.experience_id == experiences.c.id)
        .where(experiences.c.profile == profile, experiences.c.served_by == version)
        .where(experiences.c.state != ExperienceState.FORGOTTEN)
    )


def _answer(row: Mapping[Any, Any]) -> ServedAnswer:
    findings: Mapping[str, Mapping[str, Any]] = row["findings"]
    return ServedAnswer(
        scores={name: said["score"] for name, said in findings.items() if name != UNFINISHED},
        rating=row["feedback"].get("mean"),
        is_finished=UNFINISHED not in findings,
    )


def verifiers_of(answers: Sequence[ServedAnswer]) -> set[str]:
    """The verifiers that looked at any of them."""
    return {name for answer in answers for name in answer.scores}
