"""Candidates: the experiences of a profile that a dataset may be assembled from, each with the correction it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.core.visible_text import says_nothing
from tunesmith.datasets.tables import heldout_cases
from tunesmith.experience.rules.experience import (
    CorrectionState,
    ExperienceClass,
    ExperienceState,
    ReviewDecision,
    screens_of,
)
from tunesmith.experience.rules.feedback import Rating, standing_corrections
from tunesmith.experience.rules.serving_history import ServingHistory
from tunesmith.experience.tables import assessments, corrections, experiences, feedback
from tunesmith.models.queries import live_moves
from tunesmith.models.rules import AdapterState, live_spans, version_name
from tunesmith.models.tables import adapters
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.store.database import Tx

_MAX_AT_ONCE = 500  # parameters of one statement


@dataclass(frozen=True, slots=True)
class StoredCandidate:
    seq: int
    id: str
    messages: list[dict[str, Any]]
    state: ExperienceState
    class_name: ExperienceClass
    """The stored class; an unrated gold answer counts as ambiguous if `ServingHistory` excludes it."""
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
    exclusion: str | None
    """Why an unrated answer is not gold; the report counts by this text."""


def page(tx: Tx, profile: str, after: int, limit: int, *, trusts_base: bool = False) -> list[StoredCandidate]:
    """Up to `limit` candidates after sequence number `after`, oldest first.

    `trusts_base`: silence about an answer of the bare base makes it gold (experience.mix.unrated_base).

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
    return _candidates(tx, rows, *here, trusts_base=trusts_base)


def by_ids(tx: Tx, ids: Sequence[str], *, trusts_base: bool = False) -> dict[str, StoredCandidate]:
    """These experiences, by id, judged as `page` does."""
    found: list[StoredCandidate] = []
    for first in range(0, len(ids), _MAX_AT_ONCE):
        here = experiences.c.id.in_(ids[first : first + _MAX_AT_ONCE])
        found += _candidates(tx, _read(tx, _QUERY.where(here)), here, trusts_base=trusts_base)
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


def has_learnt(tx: Tx, profile: str) -> bool:
    """Whether any experience of the profile was ever learnt by a version that was deployed or completed."""
    consumed = (experiences.c.profile == profile, experiences.c.state == ExperienceState.CONSUMED)
    return tx.first(sa.select(experiences.c.id).where(*consumed).limit(1)) is not None


def held_out_groups(tx: Tx, profile: str) -> set[str]:
    """Every group of prompts that a dataset of the profile has ever held out, if a run has trained on it, or may."""
    is_used = heldout_cases.c.dataset_id.in_(profiles.trained_datasets(profile))
    query = sa.select(heldout_cases.c.case_id).where(heldout_cases.c.profile == profile, is_used).distinct()
    return set(tx.conn.execute(query).scalars())


_WHEN = sa.func.coalesce(experiences.c.captured_at, experiences.c.created_at, type_=experiences.c.created_at.type)
_QUERY = sa.select(
    experiences.c.seq,
    experiences.c.id,
    experiences.c.profile,
    experiences.c.messages,
    experiences.c.state,
    experiences.c.served_by,
    experiences.c.key_label,
    experiences.c.source,
    experiences.c.template,
    experiences.c.task_type,
    _WHEN.label("at"),
    assessments.c.class_name,
    assessments.c.reasons,
    assessments.c.review,
    assessments.c.suspicions,
    assessments.c.feedback,
).join(assessments, assessments.c.experience_id == experiences.c.id)
_STATES = {state.value: state for state in ExperienceState}
_CLASSES = {name.value: name for name in ExperienceClass}


def corrections_of(tx: Tx, ids: Sequence[str]) -> dict[str, str]:
    """Of some experiences, the corrections that an assembly would take."""
    found: dict[str, str] = {}
    for first in range(0, len(ids), _MAX_AT_ONCE):
        some = experiences.c.id.in_(ids[first : first + _MAX_AT_ONCE])
        found |= {each: correction for each, (correction, _) in _corrections(tx, some).items()}
    return found


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
        if not says_nothing(answer)
    }
    for experience_id, said in _said(tx, *here).items():
        for rating in standing_corrections(said)[-1:]:
            assert rating.correction is not None
            found[experience_id] = (rating.correction, rating.said_by)
    return found


def _said(tx: Tx, *here: Any) -> dict[str, list[Rating]]:
    """What raters said, oldest first, of each experience that somebody has ever corrected."""
    earlier = feedback.alias()
    is_corrected = sa.exists().where(
        earlier.c.experience_id == feedback.c.experience_id, earlier.c.correction.is_not(None)
    )
    query = (
        sa.select(*(feedback.c[name] for name in ("experience_id", "rater", "value", "correction", "key_label")))
        .join(experiences, experiences.c.id == feedback.c.experience_id)
        .where(sa.not_(feedback.c.is_implicit), is_corrected, *here)
        .order_by(feedback.c.seq)
    )
    found: dict[str, list[Rating]] = {}
    for experience_id, rater, value, correction, key_label in tx.conn.execute(query):
        said = Rating(rater, value, correction=correction, key_label=key_label)
        found.setdefault(experience_id, []).append(said)
    return found


def _read(tx: Tx, query: sa.Select[Any]) -> Sequence[Any]:
    """Plain rows: a profile may have millions, and each is looked at."""
    return tx.conn.execute(query).all()


def _candidates(tx: Tx, rows: Sequence[Any], *here: Any, trusts_base: bool) -> list[StoredCandidate]:
    corrected = _corrections(tx, *here)
    names = {row.profile for row in rows}
    histories = {profile: serving_history(tx, profile, trusts_base=trusts_base) for profile in names}
    found = []
    for row in rows:
        is_accepted = row.review == ReviewDecision.ACCEPT
        class_name, reasons, exclusion = _CLASSES[row.class_name], tuple(row.reasons), None
        if class_name is ExperienceClass.GOLD and row.feedback.get("mean") is None and not is_accepted:
            exclusion = histories[row.profile].exclusion(row.served_by, row.at, is_served=row.key_label is not None)
        if exclusion is not None:
            class_name, reasons = ExperienceClass.AMBIGUOUS, (exclusion.reason,)
        correction, corrected_by = corrected.get(row.id, (None, None))
        found.append(
            StoredCandidate(
                seq=row.seq,
                id=row.id,
                messages=row.messages,
                state=_STATES[row.state],
                class_name=class_name,
                reasons=reasons,
                source=row.source,
                template=row.template,
                task_type=row.task_type,
                captured_at=row.at,
                overruled=screens_of(row.suspicions) if is_accepted else (),
                correction=correction,
                corrected_by=corrected_by,
                exclusion=None if exclusion is None else exclusion.kind,
            )
        )
    return found


def serving_history(tx: Tx, profile: str, *, trusts_base: bool = False) -> ServingHistory:
    """Which versions proved themselves, and when the bare base was what was live."""
    mine = sa.select(adapters.c.version, adapters.c.state).where(adapters.c.profile == profile)
    states = {version_name(profile, version): AdapterState(state) for version, state in tx.conn.execute(mine)}
    found = live_spans(profile, live_moves(tx, profile))
    spans = [(span.since, span.until) for span in found if span.adapter_id is not None and span.since is not None]
    return ServingHistory(profile, states, spans, trusts_base)
