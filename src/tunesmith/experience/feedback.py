"""Feedback: what a person says about an answer is checked, stored, and decides the answer's class again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from tunesmith.core.errors import NotFound, UsageError, quoted
from tunesmith.experience import capture, rate
from tunesmith.experience.capture import CaptureRules
from tunesmith.experience.policy import rules_of, thresholds_of
from tunesmith.experience.queries import assessments, experiences
from tunesmith.experience.rules.experience import ReviewDecision, screens_of
from tunesmith.experience.rules.feedback import Feedback, Rating, value_of
from tunesmith.profiles.sections.experience import ExperiencePolicy
from tunesmith.profiles.sections.screens import DEFAULT_SCREENS
from tunesmith.runs.session import Session


@dataclass(frozen=True)
class RatedView:
    """What came of a feedback, and what the experience is worth since."""

    id: str
    experience_id: str
    is_new: bool
    class_name: str
    reasons: tuple[str, ...]
    feedback: Feedback


class Said(TypedDict, total=False):
    """What may be said beside the rating."""

    rater: str | None
    comment: str | None
    correction: str | None
    key_label: str | None


def add_feedback(
    session: Session, experience_id: str, value: str | float | None = None, **said: Unpack[Said]
) -> RatedView:
    """Store what a person says about an answer, and decide its class again; durable when this returns.

    The rater is whoever the session belongs to, unless told.
    """
    if not isinstance(experience_id, str):
        raise UsageError(f"experience_id is {quoted(repr(experience_id))}; give an id, or PROFILE:KEY, as a str")
    try:
        score = None if value is None else value_of(str(value))
    except ValueError as error:
        raise UsageError(f"{quoted(str(value))} is no rating; {error}") from None
    rater, correction = said.get("rater"), said.get("correction")
    said_by = session.actor if rater is None else rater
    rating = rate.check(
        Rating(said_by, score, comment=said.get("comment"), correction=correction, key_label=said.get("key_label"))
    )
    rate.check_person(said_by)
    database = session.database
    with database.read() as tx:
        found = experiences.find(tx, experience_id)
    if correction is not None:
        rate.refuse_suspect(_suspicions_in(session, correction, found))
    limits = thresholds_of(database, session.workspace, found.profile, session.environ)
    label = said.get("key_label")
    actor = session.actor if label is None else f"key:{label}"  # the server only passes on what its caller says
    with database.write() as tx:
        feedback_id, is_new = rate.add_rating(tx, found.id, rating, limits, actor=actor)
        now = assessments.get(tx, found.id)
    return RatedView(feedback_id, found.id, is_new, now.class_name, now.reasons, now.feedback)


def _suspicions_in(session: Session, correction: str, found: experiences.Experience) -> list[str]:
    """What an assembly would find in it: what a reviewer has overruled about this experience does not count."""
    with session.database.read() as tx:
        now = assessments.get(tx, found.id)
    try:
        rules = rules_of(session, found.profile)
    except NotFound:  # the file of the profile is gone: feedback about it still counts
        rules = CaptureRules(ExperiencePolicy(), screens=DEFAULT_SCREENS)
    overruled = screens_of(now.suspicions) if now.review is ReviewDecision.ACCEPT else ()
    counting = tuple(screen for screen in rules.screens if screen not in overruled)
    return capture.suspicions_in([{"content": correction}], replace(rules, screens=counting))
