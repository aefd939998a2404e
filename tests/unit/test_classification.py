"""The classes of experiences against DESIGN's table, and on anything at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.rules.classes import classify
from tunesmith.experience.rules.experience import ExperienceClass as Class
from tunesmith.experience.rules.feedback import (
    Feedback,
    Rating,
    aggregate,
    complaint_in,
    standing_corrections,
    value_of,
)
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.verifiers.base import Finding
from tunesmith.verifiers.builtin import ECHO, ENTITY_PRESERVATION
from tunesmith.verifiers.registry import VERIFIERS, monitors_among

GOOD = {ENTITY_PRESERVATION: Finding(1.0), ECHO: Finding(1.0), "length": Finding(1.0)}
NONE = Feedback()


def class_of(findings: dict[str, Finding], feedback: Feedback = NONE, suspicions: tuple[str, ...] = ()) -> Class:
    return classify(findings, feedback, suspicions, monitors=monitors_among(findings)).class_name


@pytest.mark.parametrize(
    ("findings", "feedback", "expected"),
    [
        (GOOD, NONE, Class.GOLD),  # a clean entry without feedback
        (GOOD, Feedback(0.81, 1), Class.GOLD),
        (GOOD, Feedback(0.8, 1), Class.AMBIGUOUS),
        (GOOD, Feedback(0.0, 2), Class.AMBIGUOUS),  # two raters are not enough to call it poor
        (GOOD, Feedback(0.29, 3), Class.NEEDS_IMPROVEMENT),
        (GOOD, Feedback(0.3, 3), Class.AMBIGUOUS),
        (GOOD | {ENTITY_PRESERVATION: Finding(0.9)}, NONE, Class.AMBIGUOUS),
        (GOOD | {ENTITY_PRESERVATION: Finding(0.901)}, NONE, Class.GOLD),
        (GOOD | {ENTITY_PRESERVATION: Finding(0.7)}, NONE, Class.AMBIGUOUS),
        (GOOD | {ENTITY_PRESERVATION: Finding(0.69)}, Feedback(1.0, 9), Class.NEEDS_IMPROVEMENT),
        (GOOD | {ENTITY_PRESERVATION: Finding(None)}, NONE, Class.GOLD),  # does not apply: the others decide
        ({"length": Finding(1.0)}, NONE, Class.GOLD),  # without the ENTITY_PRESERVATION verifier the others decide
        (GOOD | {ECHO: Finding(0.1, flagged=True)}, Feedback(1.0, 9), Class.NEEDS_IMPROVEMENT),
        (GOOD | {"length": Finding(0.1, flagged=True)}, NONE, Class.AMBIGUOUS),
        (GOOD | {"length": Finding(0.1, flagged=True)}, Feedback(1.0, 1), Class.GOLD),
        (GOOD | {"fabrication": Finding(0.0, flagged=True)}, NONE, Class.GOLD),  # monitors only
        (GOOD, Feedback(num_complaints=1), Class.AMBIGUOUS),
        (GOOD, Feedback(1.0, 1, num_complaints=1), Class.GOLD),  # what somebody said outweighs the hint
        (GOOD, Feedback(1.0, 1, num_corrections=1), Class.AMBIGUOUS),
        ({}, NONE, Class.AMBIGUOUS),  # nobody and nothing has looked at it
        ({}, Feedback(1.0, 1), Class.GOLD),
    ],
)
def test_class_follows_the_design(findings: dict[str, Finding], feedback: Feedback, expected: Class) -> None:
    assert class_of(findings, feedback) is expected


def test_suspect_is_quarantined_whatever_else_is_known() -> None:
    assert class_of(GOOD, Feedback(1.0, 50), ("holds '<|im_start|>'",)) is Class.QUARANTINED


@pytest.mark.parametrize(
    ("said", "value"),
    [("helpful", 1.0), ("Partial", 0.5), ("irrelevant", 0.0), ("up", 1.0), ("down", 0.0), ("0.25", 0.25), ("1", 1.0)],
)
def test_value_of_what_people_say(said: str, value: float) -> None:
    assert value_of(said) == value


@pytest.mark.parametrize("said", ["", "good", "-0.1", "1.01", "nan", "inf", "1e999", "0x1"])
def test_value_of_anything_else_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="helpful, partial, irrelevant"):
        value_of(said)


def test_aggregate_counts_the_last_word_of_each_rater() -> None:
    ratings = [
        Rating("ann", 0.0),
        Rating("bob", 1.0),
        Rating("ann", 1.0),
        Rating("cy", 0.5),
        Rating("bob", None),
    ]
    assert aggregate(ratings) == Feedback(mean=2.5 / 3, num=3)


def test_aggregate_keeps_implicit_feedback_out_of_the_mean() -> None:
    ratings = [Rating("implicit", 0.0, is_implicit=True), Rating("ann", 1.0, correction="2")]
    assert aggregate(ratings) == Feedback(mean=1.0, num=1, num_corrections=1, num_complaints=1)


def test_aggregate_counts_raters_that_look_alike_as_one() -> None:
    ratings = [
        Rating("ann", 0.0),
        Rating("\u00c5sa", 0.0),
        Rating(" ANN\u200b", 1.0),
        Rating("a\u030asa", 1.0),
    ]
    assert aggregate(ratings) == Feedback(mean=1.0, num=2)


def test_correction_stands_until_its_rater_rates_without_one() -> None:
    bob, ann = Rating("bob", 0.0, correction="2"), Rating("ann", correction="3")
    assert standing_corrections([bob, ann]) == [bob, ann]
    assert standing_corrections([bob, ann, Rating("bob", comment="so it is")]) == [bob, ann]
    assert standing_corrections([bob, ann, Rating("Bob", 1.0)]) == [ann]
    assert standing_corrections([bob, ann, bob]) == [ann, bob]
    assert standing_corrections([bob, Rating("bob", 0.0, is_implicit=True)]) == [bob]
    assert aggregate([bob, ann, Rating("bob", 1.0)]) == Feedback(mean=1.0, num=1, num_corrections=1)


scores = st.none() | st.floats(0.0, 1.0)
findings_of_any = st.dictionaries(st.sampled_from(sorted(VERIFIERS)), st.builds(Finding, scores, st.booleans()))
ratings_of_any = st.lists(
    st.builds(Rating, st.sampled_from("abcde"), scores, st.booleans(), correction=st.none() | st.just("2"))
)


@pytest.mark.slow
@given(findings_of_any, ratings_of_any, st.lists(st.text(min_size=1), max_size=2), st.floats(0.0, 1.0), st.floats(0, 1))
def test_classify_is_total_deterministic_and_gives_reasons(
    findings: dict[str, Finding], ratings: list[Rating], suspicions: list[str], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    limits = Thresholds(gold_entities=high, poor_entities=low, gold_feedback=high, poor_feedback=low)
    feedback = aggregate(ratings)
    monitors = monitors_among(findings)
    said = classify(findings, feedback, suspicions, limits, monitors=monitors)
    assert said == classify(dict(reversed(findings.items())), feedback, suspicions, limits, monitors=monitors)
    assert said.reasons
    kept = findings[ENTITY_PRESERVATION].score if ENTITY_PRESERVATION in findings else None
    echoes = ECHO in findings and findings[ECHO].flagged
    match said.class_name:
        case Class.QUARANTINED:
            assert suspicions
        case Class.GOLD:
            assert not suspicions
            assert not echoes
            assert kept is None or kept > high
            assert feedback.num_corrections == 0
            assert feedback.mean > high if feedback.mean is not None else feedback.num_complaints == 0
        case Class.NEEDS_IMPROVEMENT:
            poorly_rated = feedback.mean is not None and feedback.mean < low and feedback.num >= 3
            assert echoes or poorly_rated or (kept is not None and kept < low)
        case Class.AMBIGUOUS:
            assert not echoes
            assert kept is None or kept >= low


@given(ratings_of_any)
def test_aggregate_lies_between_the_ratings(ratings: list[Rating]) -> None:
    feedback = aggregate(ratings)
    values = [rating.value for rating in ratings if rating.value is not None and not rating.is_implicit]
    assert (feedback.mean is None) == (not values)
    if feedback.mean is not None:
        assert math.nextafter(min(values), -1) <= feedback.mean <= math.nextafter(max(values), 2)


@pytest.mark.parametrize(
    "text",
    [
        "No, that's wrong.",
        "that is completely incorrect",
        "This is not what I asked for",
        "You didn't answer my question",
        "Wrong! It is Canberra.",
        "no, I meant the other one",
        "Das ist leider falsch.",
        "I said the red one",
    ],
)
def test_complaint_is_heard(text: str) -> None:
    assert complaint_in(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "Thanks, that is what I wanted.",
        "No",
        "What is wrong with my car?",
        "Which of these is false: a, b or c?",
        "Translate: I am hungry",
        "Is it right to say this?",
        "And the second one?",
        "x" * 500 + " that's wrong",
        "",
    ],
)
def test_complaint_is_not_heard_where_there_is_none(text: str) -> None:
    assert complaint_in(text) is None


def test_thresholds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="poor_entities"):
        Thresholds(gold_entities=0.5, poor_entities=0.6)
    with pytest.raises(ValueError, match="poor_feedback"):
        Thresholds(gold_feedback=0.2)
