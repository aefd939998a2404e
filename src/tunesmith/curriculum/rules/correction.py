"""Whether a teacher's answer is learnt in place of the student's. Pure; fails closed; every refusal has its reason.

The order between two answers to one prompt: each verifier that decides a class compares them by (not flagged, score),
where a score that does not apply to one of the two compares as equal. One answer beats another if it is better under
at least one verifier and worse under none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunesmith.core.visible_text import says_nothing
from tunesmith.curriculum.rules.cycle import decides
from tunesmith.experience.rules.feedback import complaint_in
from tunesmith.verifiers.base import Finding, Interaction

_MAX_CHARS = 200_000  # as a correction by a person


@dataclass(frozen=True)
class Reply:
    """What a teacher said, as far as it can be learnt from."""

    text: str
    finish: str | None
    """Why it ended, as the endpoint says: stop, length, tool_calls, content_filter, …; None: it does not say."""
    num_in: int | None
    """Tokens of the prompt, as billed; None: not said."""
    num_out: int | None


@dataclass(frozen=True)
class ComparedAnswers:
    """The findings of the same verifiers for both answers, and of the screens for the teacher's."""

    student: Mapping[str, Finding]
    teacher: Mapping[str, Finding]
    suspicions: Sequence[str]


@dataclass(frozen=True)
class CorrectionDecision:
    """Whether the teacher's answer is stored as a correction, and why."""

    is_accepted: bool
    reason: str


def unusable(reply: Reply, student: Interaction) -> str | None:
    """Why an answer is not even worth a verifier's look."""
    if reply.finish == "length":
        return "it was cut off at curriculum.teacher.max_tokens"
    if reply.finish not in ("stop", None):
        return f"it did not end as an answer does: {reply.finish[:40]!r}"
    if says_nothing(reply.text):
        return "it is empty"
    if len(reply.text) > _MAX_CHARS:
        return f"it has more than {_MAX_CHARS} characters"
    if "\0" in reply.text or reply.text.encode(errors="ignore").decode() != reply.text:
        return "it holds a character that no database can store"
    if _plain(reply.text) == _plain(student.answer):
        return "it says what the student said"
    heard = complaint_in(reply.text)
    if heard is not None:
        return f"it reads like a complaint ({heard!r}), not like an answer"
    return None


def decide(compared: ComparedAnswers, min_score: float) -> CorrectionDecision:
    """Accept only an answer without suspicions that scores `min_score` with every verifier and beats the student's."""
    if compared.suspicions:
        return CorrectionDecision(False, f"a screen found something in it: {compared.suspicions[0]}")
    failed = _below(compared.teacher, min_score)
    if failed is not None:
        return CorrectionDecision(False, failed)
    better, worse = _compared(compared)
    if worse:
        return CorrectionDecision(False, f"it is worse than the student's: {worse[0]}")
    if not better:
        return CorrectionDecision(False, "no verifier finds it better than the student's")
    return CorrectionDecision(True, "; ".join(better))


def _below(findings: Mapping[str, Finding], min_score: float) -> str | None:
    """The first verifier that does not pass it; one that nothing applies to is not passed either."""
    known = {name: finding for name, finding in sorted(findings.items()) if decides(name)}
    for name, finding in known.items():
        if finding.flagged:
            return f"{name}: {finding.reason or 'flagged'}"
        if finding.score is not None and not finding.score >= min_score:
            return f"{name} {finding.score:.2f} is below {min_score:g} (curriculum.min_score): {finding.reason}"
    if all(finding.score is None for finding in known.values()):
        return "no verifier applies to it, so nothing says that it is good"
    return None


def _compared(compared: ComparedAnswers) -> tuple[list[str], list[str]]:
    """Where the teacher's is better, and where it is worse."""
    found: dict[Literal["better", "worse"], list[str]] = {"better": [], "worse": []}
    for name in sorted(compared.student.keys() & compared.teacher.keys()):
        mine, theirs = compared.student[name], compared.teacher[name]
        if not decides(name):
            continue
        if mine.flagged != theirs.flagged:
            better, what = mine.flagged, "not flagged" if mine.flagged else "flagged"
        elif mine.score is None or theirs.score is None or mine.score == theirs.score:
            continue
        else:
            better, what = theirs.score > mine.score, f"{theirs.score:.2f} instead of {mine.score:.2f}"
        found["better" if better else "worse"].append(f"{name} {what}")
    return found["better"], found["worse"]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
