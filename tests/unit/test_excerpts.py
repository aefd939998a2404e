"""What reviewers see is safe, and what they decide outweighs what is suspected."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.datasets.screens.excerpts import escaped, excerpt, masked, safe_text
from tunesmith.experience.rules.classes import REJECTED, assess
from tunesmith.experience.rules.experience import ExperienceClass as Class
from tunesmith.experience.rules.experience import ReviewDecision, screens_of
from tunesmith.experience.rules.feedback import Feedback
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.verifiers.base import Finding

CLEAN = {"length": Finding(1.0)}
SUSPECT = ("secret: a key (AK…)",)
LIMITS = Thresholds()
KEY = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"


def test_accepted_suspect_is_judged_without_its_suspicions() -> None:
    suspect = assess(CLEAN, SUSPECT, Feedback(), LIMITS, monitors=())
    accepted = suspect.with_review(ReviewDecision.ACCEPT, LIMITS, monitors=())
    assert (suspect.class_name, accepted.class_name) == (Class.QUARANTINED, Class.GOLD)
    assert accepted.suspicions == SUSPECT  # they stay known


def test_rejected_experience_is_quarantined_without_any_suspicion() -> None:
    rejected = assess(CLEAN, (), Feedback(), LIMITS, monitors=()).with_review(
        ReviewDecision.REJECT, LIMITS, monitors=()
    )
    assert (rejected.class_name, rejected.reasons) == (Class.QUARANTINED, (REJECTED,))


@pytest.mark.parametrize(
    ("decision", "expected"),
    [(ReviewDecision.ACCEPT, Class.NEEDS_IMPROVEMENT), (ReviewDecision.REJECT, Class.QUARANTINED)],
)
def test_late_feedback_keeps_the_decision(decision: ReviewDecision, expected: Class) -> None:
    decided = assess(CLEAN, SUSPECT, Feedback(), LIMITS, monitors=()).with_review(decision, LIMITS, monitors=())
    later = decided.with_feedback(Feedback(0.0, 5), LIMITS, monitors=())
    assert (later.class_name, later.review) == (expected, decision)


def test_the_last_decision_counts() -> None:
    suspect = assess(CLEAN, SUSPECT, Feedback(), LIMITS, monitors=())
    there_and_back = suspect.with_review(ReviewDecision.REJECT, LIMITS, monitors=()).with_review(
        ReviewDecision.ACCEPT, LIMITS, monitors=()
    )
    assert there_and_back.class_name is Class.GOLD


HOSTILE = [
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\rb", "\u202eevil\u202c", "zero\u200bwidth", "tag\U000e0041",
    "\x9b31m", "line\u2028break", "blank\u3164letter", "select\ufe0f", "a" + "\u0301" * 40, "\x00\x7f\x08",
    "\u2066isolated\u2069", "bom\ufeff", "new\nline",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_escaped(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert "\\" in shown


@given(st.text(max_size=80))
def test_whatever_is_said_nothing_invisible_is_shown(text: str) -> None:
    shown = excerpt(text, 40)
    assert shown.isprintable()
    assert not any(unicodedata.category(char) in ("Cf", "Cc", "Co", "Cs", "Zl", "Zp") for char in shown)
    assert len(shown) <= 161


def test_ordinary_text_of_any_language_is_left_as_it_is() -> None:
    for text in ("Grüße aus Köln", "שלום", "नमस्ते", "안녕하세요", "plain text, 100 %", "tiếng Việt"):
        assert escaped(text) == text


def test_secrets_and_personal_data_are_masked_wherever_they_stand() -> None:
    text = f"My key is {KEY} and I am ann.lee@gmail.com, call +49 170 1234567. " * 12
    shown = safe_text(text, 5000)
    for private in (KEY, KEY[:12], "ann.lee", "1234567"):
        assert private not in shown
    assert shown.count("[…]") >= 12


def test_secret_at_the_end_of_the_excerpt_is_not_shown_in_part() -> None:
    assert KEY[:8] not in safe_text("x " * 70 + KEY, 150)


def test_finder_that_finds_for_ever_ends() -> None:
    assert "must not be shown" in masked("abc", lambda text: [(0, 1)])


def test_screens_are_named_once_each() -> None:
    assert screens_of(["secret: a (b: c)", "link: d", "secret: e"]) == ("secret", "link")
