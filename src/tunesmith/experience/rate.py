"""Rate: what somebody says about an experience, and the class that follows from everything said by then."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.core.errors import Refused, UsageError, quoted
from tunesmith.core.strict_json import check_storable
from tunesmith.core.visible_text import says_nothing
from tunesmith.experience.queries import assessments, experiences, feedback
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.rules.feedback import RESERVED_RATERS, Rating, aggregate, complaint_in, rater_key
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.store.database import Tx
from tunesmith.verifiers.registry import monitors_among

_MAX_COMMENT = 10_000
_MAX_CORRECTION = 200_000


def check(rating: Rating) -> Rating:
    """Validate a rating and return it; raises if it says nothing, or what must not be learnt."""
    if rating.value is None and not rating.comment and not rating.correction:
        raise UsageError("nothing is said: give a rating, a comment or a correction")
    texts = {"rater": (rating.rater, 200), "comment": (rating.comment, _MAX_COMMENT)}
    for name, (text, limit) in {**texts, "correction": (rating.correction, _MAX_CORRECTION)}.items():
        if text is None and name != "rater":
            continue
        if not isinstance(text, str):
            raise UsageError(f"{name} is no text but {quoted(type(text).__name__)}; give a str, or leave it out")
        if says_nothing(text) or len(text) > limit:
            raise UsageError(
                f"{name} is empty, shows nothing, or is longer than {limit} characters; fix it, or leave it out"
            )
        check_storable(text, name)
    heard = None if rating.correction is None else complaint_in(rating.correction)
    if heard is not None:
        raise Refused(
            f"the correction reads like a complaint ({heard!r}), and it would be learnt as an answer; "
            "write the answer that should have been given, and put the complaint into the comment"
        )
    return rating


def check_person(rater: str) -> None:
    """Raises where a rater's name is one that only tunesmith itself rates under, or shows nothing."""
    key = rater_key(rater)
    if not key:
        raise UsageError("rater is empty, or nothing of it can be seen; give a name, or leave it out")
    if key in RESERVED_RATERS:
        raise UsageError(
            f"the rater {quoted(rater)} is reserved for what no person says; give another name as the rater"
        )


def refuse_suspect(suspicions: Sequence[str]) -> None:
    """Raises where a correction is suspect: every assembly would leave it out, and nobody would know."""
    if suspicions:
        raise Refused(
            f"the correction would be kept out of every dataset ({'; '.join(suspicions)}); "
            "remove it from the correction and give it again"
        )


def add_rating(tx: Tx, experience_id: str, rating: Rating, limits: Thresholds, *, actor: str) -> tuple[str, bool]:
    """Store a rating and decide the class again. Returns the feedback's id and whether it is new.

    Durable once `tx` has committed.
    """
    experience = experiences.lock(tx, experience_id)
    if experience.state is ExperienceState.FORGOTTEN:
        raise Refused(f"experience {experience_id} was forgotten; nothing more can be said about it")
    feedback_id, is_new = feedback.add(tx, experience_id, rating, actor=actor)
    if is_new:
        said = aggregate(feedback.of_experience(tx, experience_id))
        old = assessments.get(tx, experience_id)
        now = old.with_feedback(said, limits, monitors=monitors_among(old.findings))
        assessments.decide(tx, experience_id, now, actor=actor)
    return feedback_id, is_new
