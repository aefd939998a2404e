"""Review: a person decides about suspects. What they see never repeats a secret and never steers their terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tunesmith.core.errors import Refused, UsageError, did_you_mean, quoted
from tunesmith.core.strict_json import check_storable
from tunesmith.core.visible_text import says_nothing
from tunesmith.datasets.screens.excerpts import _EXCERPT, escaped, safe_text
from tunesmith.experience.queries import assessments, candidates, experiences, reviews
from tunesmith.experience.queries.experiences import Experience
from tunesmith.experience.rules.classes import Assessment
from tunesmith.experience.rules.experience import REJECTED_RUNS, ExperienceState, ReviewDecision, screens_of
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.profiles.sections.screens import Screen
from tunesmith.store.database import Database, Tx
from tunesmith.verifiers.base import Interaction
from tunesmith.verifiers.registry import monitors_among

_MAX_REASON = 2000
_TOGETHER = 100  # in one transaction: well below a second


@dataclass(frozen=True)
class Suspect:
    """An experience that waits for a person. Every text in it is safe to show."""

    id: str
    profile: str
    state: str
    class_name: str
    why: tuple[str, ...]
    question: str
    answer: str
    correction: str | None
    """What is learnt in the answer's place, where somebody has corrected it."""
    review: str | None
    num_rejections: int
    in_review: bool
    source: str | None
    captured_at: datetime


@dataclass(frozen=True)
class Decided:
    """What came of a decision."""

    id: str
    is_new: bool
    """False: this was decided before, and nothing has changed."""
    decision: ReviewDecision
    class_name: str
    reasons: tuple[str, ...]


def suspect_of(experience: Experience, assessment: Assessment, correction: str | None) -> Suspect:
    """An experience as a reviewer may see it."""
    why = [safe_text(reason, 2 * _EXCERPT) for reason in assessment.suspicions]
    if experience.in_review:
        why.append(f"{REJECTED_RUNS}: was in {experience.num_rejections} rejected runs")
    talk = Interaction(experience.messages) if experience.messages else None
    return Suspect(
        id=experience.id,
        profile=experience.profile,
        state=experience.state,
        class_name=assessment.class_name,
        why=tuple(why),
        question="" if talk is None else safe_text(talk.question),
        answer="" if talk is None else safe_text(talk.answer),
        correction=None if correction is None else safe_text(correction),
        review=None if assessment.review is None else assessment.review.value,
        num_rejections=experience.num_rejections,
        in_review=experience.in_review,
        source=None if experience.source is None else escaped(experience.source),
        captured_at=experience.captured_at or experience.created_at,
    )


def listing(database: Database, profile: str | None, limit: int) -> list[Suspect]:
    """What waits, the newest first."""
    with database.read() as tx:
        names = reviews.profiles_known(tx) if profile is None else [profile]
        waiting = [pair for name in names for pair in reviews.waiting(tx, name, limit)]
        found = sorted(waiting, key=lambda pair: -pair[0].seq)[:limit]
        better = candidates.corrections_of(tx, [experience.id for experience, _ in found])
    return [suspect_of(*pair, better.get(pair[0].id)) for pair in found]


def check_reason(reason: str) -> str:
    """The reason again, trimmed; a decision without one is no decision that anybody could follow later."""
    if says_nothing(reason) or len(reason) > _MAX_REASON:
        raise UsageError(f"say why with a reason of 1 to {_MAX_REASON} characters; it is kept in the history")
    check_storable(reason, "the reason")
    return reason.strip()


def decide(
    tx: Tx, experience_id: str, decision: ReviewDecision, limits: Thresholds, *, reviewer: str, reason: str
) -> Decided:
    """Overrule what is suspected, or keep the experience out for good; said again, it changes nothing."""
    experience = experiences.lock(tx, experience_id)
    if experience.state is ExperienceState.FORGOTTEN:
        raise Refused(f"experience {experience_id} was forgotten; nothing is left to decide about")
    old = assessments.get(tx, experience_id)
    is_known = old.review is decision and not experience.in_review
    if not is_known:
        _check_sense(experience, old, decision)
        reviews.add(tx, experience_id, decision, reviewer=reviewer, reason=reason)
        now = old.with_review(decision, limits, monitors=monitors_among(old.findings))
        assessments.decide(tx, experience_id, now, actor=reviewer)
    now = assessments.get(tx, experience_id)
    return Decided(experience_id, not is_known, decision, now.class_name, now.reasons)


def _check_sense(experience: Experience, assessment: Assessment, decision: ReviewDecision) -> None:
    waits = bool(assessment.suspicions) or experience.in_review or assessment.review is not None
    if decision is ReviewDecision.ACCEPT and not waits:
        raise Refused(
            f"experience {experience.id} is {assessment.class_name} and nothing is suspected: nothing to accept"
        )
    if decision is ReviewDecision.REJECT and experience.state is ExperienceState.RESERVED:
        raise Refused(
            f"experience {experience.id} is in dataset {experience.dataset_id}, which a run may be reading; "
            "cancel that run first, or reject it when the run has ended"
        )


def ids_with(database: Database, profile: str | None, reason: str, decision: ReviewDecision) -> list[str]:
    """Everything that waits for this reason. Only what nothing else speaks against is accepted in one go."""
    known = (REJECTED_RUNS, *(screen.value for screen in Screen))
    if reason not in known:
        raise UsageError(f"nothing waits because of {quoted(reason)}{did_you_mean(reason, known)}")
    found: list[str] = []
    with database.read() as tx:
        for name in reviews.profiles_known(tx) if profile is None else [profile]:
            suspects = reviews.suspicions_waiting(tx, name)
            if reason == REJECTED_RUNS:
                suspected = {experience_id for experience_id, _ in suspects}
                waiting = reviews.ids_in_review(tx, name)
                found += [each for each in waiting if decision is ReviewDecision.REJECT or each not in suspected]
                continue
            in_review = set(reviews.ids_in_review(tx, name))
            for experience_id, suspicions in suspects:
                alone = screens_of(suspicions) == (reason,) and experience_id not in in_review
                if alone or (decision is ReviewDecision.REJECT and reason in screens_of(suspicions)):
                    found.append(experience_id)
    return found


def decide_all(
    database: Database,
    ids: Sequence[str],
    decision: ReviewDecision,
    limits: Mapping[str, Thresholds],
    *,
    reviewer: str,
    reason: str,
) -> list[Decided]:
    """Decide about many, some in each transaction; `limits` are those of each profile."""
    decided: list[Decided] = []
    for start in range(0, len(ids), _TOGETHER):
        with database.write() as tx:
            for experience_id in ids[start : start + _TOGETHER]:
                thresholds = limits[experiences.get(tx, experience_id).profile]
                decided.append(decide(tx, experience_id, decision, thresholds, reviewer=reviewer, reason=reason))
    return decided
