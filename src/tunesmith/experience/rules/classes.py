"""Classification: what an experience is worth, decided from scores, feedback and suspicions, always with reasons.

Pure and total: any input has a class, the same input has the same class, and late feedback simply decides again.
`monitors` names the verifiers whose flags do not count; which these are depends on what is installed, so a caller asks
`verifiers/registry.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tunesmith.experience.rules.experience import ExperienceClass, ReviewDecision
from tunesmith.experience.rules.feedback import IMPLICIT_CONFIDENCE, Feedback
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.verifiers.base import UNFINISHED, Finding
from tunesmith.verifiers.builtin import ECHO, ENTITY_PRESERVATION

REJECTED = "a reviewer has rejected it"


@dataclass(frozen=True)
class Classified:
    class_name: ExperienceClass
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Assessment:
    """What is known about an experience. Findings and suspicions never change; feedback, review and class do."""

    findings: Mapping[str, Finding]
    suspicions: tuple[str, ...]
    feedback: Feedback
    class_name: ExperienceClass
    reasons: tuple[str, ...]
    review: ReviewDecision | None = None
    """The last decision of a person about it; it outweighs suspicions until a person decides otherwise."""

    def with_feedback(self, feedback: Feedback, thresholds: Thresholds, *, monitors: Collection[str]) -> Assessment:
        """Decided again with what raters say by now."""
        return assess(self.findings, self.suspicions, feedback, thresholds, self.review, monitors=monitors)

    def with_review(self, review: ReviewDecision, thresholds: Thresholds, *, monitors: Collection[str]) -> Assessment:
        """Decided again with what a reviewer says."""
        return assess(self.findings, self.suspicions, self.feedback, thresholds, review, monitors=monitors)


def assess(
    findings: Mapping[str, Finding],
    suspicions: Sequence[str],
    feedback: Feedback,
    thresholds: Thresholds,
    review: ReviewDecision | None = None,
    *,
    monitors: Collection[str],
) -> Assessment:
    """Class an experience. A reviewer's accept makes its suspicions not count; a reject quarantines it."""
    counting = () if review is ReviewDecision.ACCEPT else suspicions
    said = classify(findings, feedback, counting, thresholds, monitors=monitors)
    if review is ReviewDecision.REJECT:
        said = Classified(ExperienceClass.QUARANTINED, (REJECTED, *suspicions))
    return Assessment(findings, tuple(suspicions), feedback, said.class_name, said.reasons, review)


def classify(
    findings: Mapping[str, Finding],
    feedback: Feedback,
    suspicions: Sequence[str] = (),
    thresholds: Thresholds = Thresholds(),
    *,
    monitors: Collection[str],
) -> Classified:
    """The class, and why: suspects first, then what is poor, then gold; ambiguous is what is none of them."""
    if suspicions:
        return Classified(ExperienceClass.QUARANTINED, tuple(suspicions))
    findings = {name: replace(each, flagged=False) if name in monitors else each for name, each in findings.items()}
    poor = _poor(findings, feedback, thresholds)
    if poor:
        return Classified(ExperienceClass.NEEDS_IMPROVEMENT, poor)
    doubts = _doubts(findings, feedback, thresholds)
    if doubts:
        return Classified(ExperienceClass.AMBIGUOUS, doubts)
    if feedback.mean is not None:
        return Classified(ExperienceClass.GOLD, (f"feedback {feedback.mean:.2f} by {feedback.num}",))
    return Classified(ExperienceClass.GOLD, ("no verifier found anything wrong, and nobody has complained",))


def _poor(findings: Mapping[str, Finding], feedback: Feedback, limits: Thresholds) -> tuple[str, ...]:
    found = []
    preserved = findings.get(ENTITY_PRESERVATION)
    if preserved is not None and preserved.score is not None and preserved.score < limits.poor_entities:
        below = f"{preserved.score:.2f} is below {limits.poor_entities:g}"
        found.append(f"{ENTITY_PRESERVATION} {below}: {preserved.reason}")
    if _is_flagged(findings, ECHO):
        found.append(f"{ECHO}: {findings[ECHO].reason}")
    if feedback.mean is not None and feedback.mean < limits.poor_feedback and feedback.num >= limits.min_poor_ratings:
        found.append(f"feedback {feedback.mean:.2f} by {feedback.num} is below {limits.poor_feedback:g}")
    return tuple(found)


def _doubts(findings: Mapping[str, Finding], feedback: Feedback, limits: Thresholds) -> tuple[str, ...]:
    """What stands between an experience that is not poor and gold."""
    found = []
    if not findings and feedback.mean is None:
        found.append("no verifier has looked at it, and nobody has rated it")
    preserved = findings.get(ENTITY_PRESERVATION)
    if preserved is not None and preserved.score is not None and preserved.score <= limits.gold_entities:
        not_above = f"{preserved.score:.2f} is not above {limits.gold_entities:g}"
        found.append(f"{ENTITY_PRESERVATION} {not_above}: {preserved.reason}")
    if feedback.num_corrections:
        found.append("a rater has corrected it")
    if _is_flagged(findings, UNFINISHED):
        found.append(findings[UNFINISHED].reason)
    if feedback.mean is not None:
        if feedback.mean <= limits.gold_feedback:
            found.append(f"feedback {feedback.mean:.2f} by {feedback.num} is not above {limits.gold_feedback:g}")
        return tuple(found)
    if feedback.num_complaints:
        found.append(f"the next turn reads like a complaint (confidence {IMPLICIT_CONFIDENCE:g})")
    flags = [name for name in sorted(findings) if name not in (ECHO, UNFINISHED) and _is_flagged(findings, name)]
    return (*found, *(f"{name}: {findings[name].reason}" for name in flags))


def _is_flagged(findings: Mapping[str, Finding], name: str) -> bool:
    return name in findings and findings[name].flagged


UNJUDGED = assess({}, (), Feedback(), Thresholds(), monitors=())
"""Of an experience that nobody and nothing has looked at."""
