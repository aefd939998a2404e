"""The watch by quality: what is enough, what rolls back, what is said; and how often it is wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tunesmith.deployment.rules.drop_test import counts_of
from tunesmith.deployment.rules.quality_watch import FEWEST, AnswerWindow, QualityVerdict, judge
from tunesmith.profiles.sections.watch import QualityWatch, SignalKind

POLICY = QualityWatch(min_s=60.0, max_s=600.0)
SIGNAL_SETS: tuple[tuple[SignalKind, ...], ...] = (
    ("verifiers", "finished", "feedback", "errors", "latency"),
    ("verifiers",),
    ("finished",),
    ("feedback",),
    ("errors",),
    ("latency",),
)
ALL = SIGNAL_SETS[0]


class Traffic:
    """Answers one after the other; `chances` says how likely each is good, by signal."""

    def __init__(self, rng: random.Random, version: str, **chances: float) -> None:
        self.rng = rng
        self.version = version
        self.chances = {
            "schema": 0.85, "finished": 0.97, "feedback": 0.8, "rated": 0.3, "errors": 0.98, "seconds": 1.0, **chances,
        }  # fmt: skip
        self.counts: dict[str, dict[float, int]] = {
            name: {} for name in ("schema", "kept", "finished", "feedback", "requests", "seconds")
        }
        self.num = 0

    def answer(self, times: int = 1) -> Traffic:
        for _ in range(times):
            self._request()
        return self

    def _request(self) -> None:
        rng, chances = self.rng, self.chances
        if not self._add("requests", float(rng.random() < chances["errors"])):
            return
        self.num += 1
        self._add("schema", float(rng.random() < chances["schema"]))
        self._add("kept", rng.choice([0.5, 0.75, 1.0, 1.0, 1.0]))
        self._add("finished", float(rng.random() < chances["finished"]))
        self._add("seconds", 2.0 ** round(rng.gauss(0.0, 1.5)) * chances["seconds"])
        if rng.random() < chances["rated"]:
            self._add("feedback", 0.5 if rng.random() < 0.1 else float(rng.random() < chances["feedback"]))

    def _add(self, name: str, value: float) -> bool:
        self.counts[name][value] = self.counts[name].get(value, 0) + 1
        return value > 0.0

    @property
    def window(self) -> AnswerWindow:
        counts = self.counts
        return AnswerWindow(
            self.version,
            self.num,
            verifiers={"json_schema": counts["schema"], "entity_preservation": counts["kept"]},
            finished=counts["finished"],
            feedback=counts["feedback"],
            requests=counts["requests"],
            seconds=counts["seconds"],
        )


def watched(
    rng: random.Random, policy: QualityWatch, *, most: int, every: int = 1, baseline: int = 1000, **worse: float
) -> tuple[int, QualityVerdict]:
    """One watch that is looked at after every few answers; when it ended, and how."""
    before = Traffic(rng, "support@v3").answer(baseline).window
    live = Traffic(rng, "support@v4", **worse)
    for number in range(every, most + 1, every):
        verdict = judge(before, live.answer(every).window, 1.0, policy)
        if verdict.decision != "again":
            return number, verdict
    return most, verdict


@pytest.mark.parametrize("signals", SIGNAL_SETS)
def test_200_healthy_watches_are_rolled_back_in_5_percent_at_most(signals: tuple[SignalKind, ...]) -> None:
    """With no drop allowed at all, and a look after every answer: the worst case of the promise."""
    policy = POLICY.model_copy(update={"signals": signals, "max_drop": 0.0, "max_slowdown": 1.0})
    ends = [watched(random.Random(seed), policy, most=100, baseline=300) for seed in range(200)]
    assert all(verdict.evidence for _, verdict in ends), "each of them was compared"
    assert sum(verdict.decision == "roll_back" for _, verdict in ends) <= 10
    assert sum(number == 100 for number, _ in ends) >= 190, "and all others were looked at a hundred times"


def test_drops_of_15_points_are_rolled_back_within_500_answers() -> None:
    """All signals are compared, one of them falls from 0.85 to 0.70, with the settings that a profile has by itself."""
    ends = [watched(random.Random(seed), QualityWatch(), most=500, every=50, schema=0.70) for seed in range(100)]
    found = [verdict for _, verdict in ends if verdict.decision == "roll_back"]
    assert len(found) >= 95
    assert all(verdict.evidence[0].signal == "json_schema" for verdict in found)


@pytest.mark.parametrize(
    ("worse", "signal", "within"),
    [
        ({"finished": 0.0}, "finished", 20),
        ({"errors": 0.5}, "errors", 100),
        ({"feedback": 0.2}, "feedback", 400),
        ({"seconds": 16.0}, "latency", 150),
        ({"schema": 0.1}, "json_schema", 60),
    ],
)
def test_gross_failures_are_found_early_and_named(worse: dict[str, float], signal: str, within: int) -> None:
    found = [watched(random.Random(seed), QualityWatch(), most=within, every=10, **worse)[1] for seed in range(20)]
    assert [verdict.decision for verdict in found].count("roll_back") >= 19
    assert {verdict.evidence[0].signal for verdict in found if verdict.decision == "roll_back"} == {signal}


def good(num: int, version: str = "support@v3", share: float = 0.9) -> AnswerWindow:
    values = counts_of([1.0] * round(num * share) + [0.0] * (num - round(num * share)))
    return AnswerWindow(version, num, {"json_schema": values}, finished={1.0: num} if num else {})


@pytest.mark.parametrize(
    ("before", "live", "watched_s", "decision", "said"),
    [
        (good(0), good(1000, "support@v4"), 1.0, "healthy",
         "not enough answers to compare with: 0 of 50 by support@v3 before the flip"),
        (good(49), good(1000, "support@v4", share=0.0), 1.0, "healthy", "compare with: 49 of 50"),
        (good(500), good(0, "support@v4"), 1.0, "again", "0 of 500 answers, 1 of 60 s"),
        (good(500), good(0, "support@v4"), 599.0, "again", "0 of 500 answers"),
        (good(500), good(3, "support@v4"), 600.0, "healthy", "not enough answers to compare: 3 of 50 by support@v4"),
        (good(500), good(130, "support@v4"), 600.0, "healthy", "no drop shown in 130 answers of support@v4, fewer"),
        (good(500), good(500, "support@v4"), 59.0, "again", "500 of 500 answers, 59 of 60 s"),
        (good(500), good(500, "support@v4"), 60.0, "healthy", "no drop shown in 500 answers of support@v4"),
        (good(500), good(60, "support@v4", share=0.5), 1.0, "roll_back", "the mean score of json_schema fell from"),
        (good(500), good(60, "support@v4", share=0.5), 9e9, "roll_back", "(60 of support@v4): by at least "),
        (good(500), good(FEWEST - 1, "support@v4", share=0.0), 1.0, "again", "no drop shown yet"),
        (good(500, share=0.2), good(500, "support@v4"), 60.0, "healthy", "no drop shown"),
    ],
)  # fmt: skip
def test_watch_ends_by_answers_time_and_drop(
    before: AnswerWindow, live: AnswerWindow, watched_s: float, decision: str, said: str
) -> None:
    verdict = judge(before, live, watched_s, POLICY)
    assert verdict.decision == decision
    assert said in verdict.reason


def test_ten_answers_are_the_fewest_that_roll_back() -> None:
    decisions = [judge(good(500), good(num, "support@v4", share=0.0), 1.0, POLICY).decision for num in (9, 10)]
    assert decisions == ["again", "roll_back"]
    slow = [replace(good(500, f"support@v{n}"), seconds={n * 1.0: 500}) for n in (3, 40)]
    live = [replace(slow[1], seconds={40.0: num}, verifiers={}, finished={}) for num in (9, 20)]
    assert [judge(slow[0], each, 1.0, POLICY).decision for each in live] == ["again", "roll_back"]


@pytest.mark.parametrize("num_captured", [50, 500])
def test_captured_answers_count_where_there_are_some(num_captured: int) -> None:
    """With a small share of capture there are many requests, and few answers to compare."""
    before = replace(good(num_captured), requests={1.0: 5000})
    live = replace(good(60, "support@v4"), requests={1.0: 600})
    assert "60 of 500 answers" in judge(before, live, 60.0, POLICY).reason


def test_requests_count_where_nothing_is_captured() -> None:
    before = AnswerWindow("support@v3", 49, requests={1.0: 5000})
    live = AnswerWindow("support@v4", 0, requests={1.0: 600})
    assert judge(before, live, 60.0, POLICY).reason == "no drop shown in 600 answers of support@v4"


def test_evidence_holds_both_sides_and_what_was_allowed() -> None:
    verdict = judge(good(500), good(60, "support@v4", share=0.5), 1.0, POLICY)
    (first, *_) = verdict.evidence
    told = first.as_json()
    assert (told["signal"], told["baseline_version"], told["live_version"]) == (
        "json_schema",
        "support@v3",
        "support@v4",
    )
    assert (told["baseline_n"], told["baseline_mean"], told["live_n"], told["live_mean"]) == (500, 0.9, 60, 0.5)
    assert told["allowed"] == 0.02
    assert told["alpha"] == pytest.approx(0.05 / 5), "json_schema, finished, feedback, errors, latency"
    assert 0.02 < told["bound"] < 0.4
    assert told["text"] == verdict.reason
    assert "99.0% sure at any number of looks" in told["text"]
    assert [each.signal for each in verdict.evidence] == ["json_schema", "finished"]


def test_evidence_of_no_live_answer_can_be_stored() -> None:
    (first, *_) = judge(good(500), good(0, "support@v4"), 1.0, POLICY).evidence
    assert first.as_json()["live_mean"] is None


def test_nothing_is_compared_where_the_profile_says_so() -> None:
    live = good(500, "support@v4", share=0.0)
    off = POLICY.model_copy(update={"enabled": False})
    assert judge(good(500), live, 1.0, off).reason == "answers are not compared (watch.quality.enabled)"
    none: Sequence[SignalKind] = ("feedback",)
    assert judge(good(500), live, 1.0, POLICY.model_copy(update={"signals": none})).decision == "healthy"


def test_slow_answers_roll_back_only_past_the_ratio() -> None:
    before = replace(good(500), seconds={1.0: 249, 2.0: 251})
    for seconds, decision in ((2.8, "again"), (6.0, "again"), (6.1, "roll_back"), (60.0, "roll_back")):
        live = replace(good(60, "support@v4"), seconds={seconds: 60})
        verdict = judge(before, live, 1.0, POLICY)
        assert verdict.decision == decision, seconds
    assert "the median answer took 2 s (500 answers of support@v3 before the flip), and takes 60 s" in verdict.reason


@pytest.mark.parametrize(
    ("num_fast_before", "live", "rolls_back"),
    [
        (281, {5.0: 12}, False),  # 1.5^12 is not enough for an error of 0.025, 1.5^13 is
        (281, {5.0: 13}, True),
        (281, {5.0: 13, 1.0: 1}, False),
        (280, {5.0: 13}, False),  # the median of before may be 2 s: 56.07 % of 500 are 280.4
    ],
)
def test_slow_answers_are_judged_at_the_error_that_is_theirs(
    num_fast_before: int, live: dict[float, int], rolls_back: bool
) -> None:
    policy = POLICY.model_copy(update={"signals": ("latency",)})
    before = AnswerWindow("a@v1", seconds={1.0: num_fast_before, 2.0: 500 - num_fast_before})
    (only,) = judge(before, AnswerWindow("a@v2", seconds=live), 1.0, policy).evidence
    assert only.rolls_back == rolls_back
    assert (only.baseline_mean, only.live_mean, only.allowed) == (1.0, 5.0, 3.0)


def test_reason_names_the_largest_drop_first_and_the_others_after_it() -> None:
    before = replace(good(500), requests={1.0: 500}, seconds={1.0: 500})
    live = replace(
        good(60, "support@v4", share=0.5), finished={0.0: 60}, requests={1.0: 30, 0.0: 60}, seconds={0.5: 1, 90.0: 59}
    )
    verdict = judge(before, live, 1.0, POLICY)
    assert [each.signal for each in verdict.evidence] == ["finished", "errors", "json_schema", "latency"]
    bounds = [each.bound for each in verdict.evidence[:3]]
    assert bounds == sorted(bounds, reverse=True)
    assert verdict.reason == (
        "the share of answers that ended by themselves fell from 1.000 (500 answers of support@v3 before the flip) to "
        f"0.000 (60 of support@v4): by at least {100 * bounds[0]:.1f} points, 99.0% sure at any number of looks; "
        "also worse: errors, json_schema, latency"
    ).replace(".0 points", " points")
    assert "(500 requests of support@v3 before the flip)" in verdict.evidence[1].text


def test_signal_without_a_drop_says_so() -> None:
    (first, *_) = judge(good(500), good(50, "support@v4"), 600.0, POLICY).evidence
    assert first.bound == 0.0
    assert first.text == (
        "the mean score of json_schema was 0.900 (500 answers of support@v3 before the flip) and is 0.900 "
        "(50 of support@v4): no drop of more than 2 points is shown"
    )
    said = judge(good(500), good(50, "support@v4"), 600.0, POLICY).reason
    assert said.startswith("no drop shown in 50 answers"), "50 are enough to compare"


def test_too_few_answers_bound_no_median() -> None:
    """Ten answers say too little about a median: it might be any."""
    policy = POLICY.model_copy(update={"min_answers": 10, "signals": ("latency",), "confidence": 0.99})
    before, live = AnswerWindow("a@v1", seconds={1.0: 10}), AnswerWindow("a@v2", seconds={1e6: 1000})
    (only,) = judge(before, live, 1.0, policy).evidence
    assert not only.rolls_back


def test_signal_is_compared_from_min_answers_on_and_has_all_of_the_error_where_it_is_alone() -> None:
    for signals in (("finished",), ("latency",)):
        policy = POLICY.model_copy(update={"signals": signals})
        for num, is_compared in ((49, False), (50, True)):
            before = AnswerWindow("a@v1", finished={1.0: num}, seconds={1.0: num})
            evidence = judge(before, AnswerWindow("a@v2"), 1.0, policy).evidence
            assert bool(evidence) == is_compared
            assert not evidence or evidence[0].alpha == pytest.approx(0.05)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 9), st.floats(0.0, 1.0), st.floats(0.0, 1e6))
def test_a_handful_of_answers_never_rolls_back(num: int, few: int, share: float, watched_s: float) -> None:
    verdict = judge(good(num), good(few, "support@v4", share=share), watched_s, POLICY)
    assert verdict.decision != "roll_back"
    assert verdict.decision == "healthy" or watched_s < POLICY.max_s
    assert verdict.reason


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2000), st.floats(0.0, 1.0))
def test_the_same_answers_never_roll_back(num: int, share: float) -> None:
    window = good(num, share=share)
    assert judge(window, replace(window, version="support@v4"), 1.0, POLICY).decision != "roll_back"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"max_s": 10.0}, "must not be shorter than watch.quality.min_s"),
        ({"min_answers": 2000}, "must not be less than watch.quality.min_answers"),
        ({"min_answers": 3}, "greater than or equal to 10"),
        ({"signals": ("vibes",)}, "Input should be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        QualityWatch(**said)


@pytest.mark.soak
@pytest.mark.parametrize("signals", SIGNAL_SETS)
def test_soak_200_healthy_watches_of_500_answers(signals: tuple[SignalKind, ...]) -> None:
    """The counts of docs/watch.md."""
    policy = POLICY.model_copy(update={"signals": signals, "max_drop": 0.0, "max_slowdown": 1.0})
    verdicts = [watched(random.Random(seed), policy, most=499)[1] for seed in range(200)]
    num = sum(verdict.decision == "roll_back" for verdict in verdicts)
    print(f"{'+'.join(signals)}: {num} of 200 healthy watches rolled back")
    assert num <= 10


@pytest.mark.soak
def test_soak_200_real_drops() -> None:
    """The counts of docs/watch.md."""
    ends = [watched(random.Random(seed), QualityWatch(), most=500, every=5, schema=0.70) for seed in range(200)]
    delays = sorted(number for number, verdict in ends if verdict.decision == "roll_back")
    print(f"{len(delays)} of 200 drops from 0.85 to 0.70 found, half of them within {delays[len(delays) // 2]} answers")
    assert len(delays) >= 190
