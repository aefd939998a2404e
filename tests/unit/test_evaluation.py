"""Paired comparison: an error is never a score, a missing case is never skipped, intervals mean what they say."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.evaluation.evaluators.base import Metric
from tunesmith.evaluation.evaluators.registry import find_metric
from tunesmith.evaluation.rules.comparison import Comparison, Report, compare, paired_interval
from tunesmith.evaluation.rules.gate import Decision, decide
from tunesmith.profiles.profile import GateSettings
from tunesmith.programs.protocol import CaseScore

LOSS, GREEDY = "heldout_loss", "exact_match_greedy"
OF_LOSS = find_metric(LOSS)


def scores(values: Sequence[float], metric: str = LOSS) -> tuple[CaseScore, ...]:
    return tuple(CaseScore(case_id=f"c{i}", values={metric: value}) for i, value in enumerate(values))


def ids(num: int) -> list[str]:
    return [f"c{i}" for i in range(num)]


def compared(candidate: Sequence[CaseScore], baseline: Sequence[CaseScore], num: int, metric: str = LOSS) -> Report:
    sides = {"candidate": candidate, "baseline": baseline}
    return compare(ids(num), sides, (find_metric(metric),), primary=find_metric(metric), confidence=0.95, seed=1)


def verdict(seen: Report, metric: str = LOSS) -> Decision:
    return decide(seen, GateSettings(primary=metric, min_cases=2), (metric,)).decision


BETTER, WORSE = [0.5 + i / 100 for i in range(10)], [1.5 + i / 100 for i in range(10)]


def test_lower_loss_is_an_improvement_and_higher_match_is_one() -> None:
    [loss] = compared(scores(BETTER), scores(WORSE), 10).comparisons
    assert (loss.n, loss.problem) == (10, None)
    assert loss.difference == pytest.approx(1.0)
    assert loss.candidate == pytest.approx(0.545)
    assert loss.baseline == pytest.approx(1.545)
    assert loss.low is not None
    assert loss.low > 0.9
    [match] = compared(scores(WORSE, GREEDY), scores(BETTER, GREEDY), 10, GREEDY).comparisons
    assert match.difference == pytest.approx(1.0)


def test_order_of_scores_does_not_matter_because_cases_are_paired_by_id() -> None:
    forwards = compared(scores(BETTER), scores(WORSE), 10)
    assert compared(scores(BETTER)[::-1], scores(WORSE)[::-1], 10) == forwards


def test_same_scores_on_both_sides_are_a_tie() -> None:
    seen = compared(scores(BETTER), scores(BETTER), 10)
    [loss] = seen.comparisons
    assert (loss.difference, loss.low, loss.high) == (0.0, 0.0, 0.0)
    assert verdict(seen) is Decision.REJECT


@pytest.mark.parametrize("side", ["candidate", "baseline"])
@pytest.mark.parametrize("flaw", ["missing", "error", "no value", "nan", "inf", "-inf"])
def test_one_flawed_case_among_many_never_promotes(side: str, flaw: str) -> None:
    good = {"candidate": scores(BETTER), "baseline": scores(WORSE)}
    assert verdict(compared(good["candidate"], good["baseline"], 10)) is Decision.PROMOTE
    flawed = {
        "missing": None,
        "error": CaseScore(case_id="c7", values={LOSS: 0.0}, error="CUDA out of memory"),
        "no value": CaseScore(case_id="c7", values={GREEDY: 1.0}),
        "nan": CaseScore(case_id="c7", values={LOSS: math.nan}),
        "inf": CaseScore(case_id="c7", values={LOSS: math.inf}),
        "-inf": CaseScore(case_id="c7", values={LOSS: -math.inf}),
    }[flaw]
    some = [score for score in good[side] if score.case_id != "c7"]
    sides = {**good, side: tuple(some if flawed is None else [*some, flawed])}
    seen = compared(sides["candidate"], sides["baseline"], 10)
    [loss] = seen.comparisons
    assert loss.problem is not None
    assert "c7" in loss.problem
    assert side in loss.problem
    assert (loss.n, loss.candidate, loss.low) == (0, None, None)
    at_fault = side == "candidate" and flaw in ("nan", "inf", "-inf")
    assert verdict(seen) is (Decision.REJECT if at_fault else Decision.HOLD)


@pytest.mark.parametrize("sides", [{}, {"candidate": scores(BETTER)}, {"baseline": scores(BETTER)}])
def test_absent_side_never_promotes(sides: dict[str, tuple[CaseScore, ...]]) -> None:
    seen = compare(ids(10), sides, (OF_LOSS,), primary=OF_LOSS, confidence=0.95, seed=1)
    assert verdict(seen) is Decision.HOLD


def test_no_cases_never_promote() -> None:
    seen = compared((), (), 0)
    assert verdict(seen) is Decision.HOLD
    assert seen.comparisons[0].problem == "there are no cases"


def test_scores_of_cases_that_were_not_asked_for_do_not_count() -> None:
    strangers = tuple(CaseScore(case_id=f"x{i}", values={LOSS: 0.0}) for i in range(90))
    seen = compared((*scores(BETTER), *strangers), (*scores(WORSE), *strangers), 10)
    assert seen == compared(scores(BETTER), scores(WORSE), 10)


@pytest.mark.parametrize("huge", [1e308, -1e308, 1.7e308])
def test_values_too_large_to_add_up_are_a_problem_not_a_crash(huge: float) -> None:
    seen = compared(scores([huge, huge, -huge]), scores([-huge, -huge, huge]), 3)
    assert verdict(seen) is not Decision.PROMOTE
    assert seen.comparisons[0].problem is not None


def test_established_cases_are_measured_apart() -> None:
    candidate, baseline = [0.1] * 5 + [2.0] * 5, [1.0] * 10
    sides = {"candidate": scores(candidate), "baseline": scores(baseline)}
    seen = compare(ids(10), sides, (OF_LOSS,), primary=OF_LOSS, established={"c5", "c6", "c7", "c8", "c9", "not here"},
                   confidence=0.95, seed=1)  # fmt: skip
    assert seen.established is not None
    assert (seen.established.n, seen.established.difference) == (5, -1.0)
    assert seen.of(LOSS) is not seen.established
    none = compare(ids(10), sides, (OF_LOSS,), primary=OF_LOSS, established={"gone"}, confidence=0.95, seed=1)
    assert none.established is None


PART = Metric("part", "higher", "applies to some cases", neutral=1.0)


def part_scores(values: Sequence[float | None]) -> tuple[CaseScore, ...]:
    """None: it does not apply."""
    return tuple(
        CaseScore(case_id=f"c{i}", not_applicable=("part",))
        if value is None
        else CaseScore(case_id=f"c{i}", values={"part": value})
        for i, value in enumerate(values)
    )


def compared_in_part(ours: Sequence[float | None], theirs: Sequence[float | None], metric: Metric = PART) -> Comparison:
    sides = {"candidate": part_scores(ours), "baseline": part_scores(theirs)}
    [seen] = compare(ids(len(ours)), sides, [metric], primary=metric, confidence=0.95, seed=1).comparisons
    return seen


def test_case_that_a_metric_applies_to_on_neither_side_is_left_out_and_counted() -> None:
    seen = compared_in_part([None, 0.5, 0.5, None], [None, 1.0, 0.0, None])
    assert (seen.n, seen.num_left_out, seen.candidate, seen.baseline) == (2, 2, 0.5, 0.5)


def test_side_that_a_metric_does_not_apply_to_counts_as_nothing_wrong() -> None:
    seen = compared_in_part([None, 0.5], [0.2, None])
    assert (seen.n, seen.num_left_out, seen.candidate, seen.baseline) == (2, 0, 0.75, 0.6)


def test_metric_that_applies_to_no_case_has_no_numbers() -> None:
    seen = compared_in_part([None, None], [None, None])
    assert (seen.problem, seen.at_fault, seen.n) == ("it applies to none of the 2 cases", "evidence", 0)


def test_metric_without_a_neutral_value_has_a_problem_where_it_does_not_apply_to_one_side() -> None:
    plain = Metric("part", "higher", "applies to every case")
    for ours, theirs, side in (([None, 0.5], [0.5, 0.5], "candidate"), ([0.5, 0.5], [0.5, None], "baseline")):
        seen = compared_in_part(ours, theirs, plain)
        assert seen.problem is not None
        assert seen.problem.startswith(side)
        assert seen.problem.endswith("no score")


@pytest.mark.parametrize(("score", "told"), [
    (CaseScore(case_id="c1", error="boom"), "failed (boom)"),
    (CaseScore(case_id="c1", values={"other": 1.0}), "no score"),
    (None, "no score"),
])  # fmt: skip
def test_case_that_failed_on_both_sides_is_a_problem_and_never_left_out(score: CaseScore | None, told: str) -> None:
    """Also under a metric that need not apply to every case: saying nothing is not the same as not applying."""
    side = (part_scores([0.5])[0], *([] if score is None else [score]))
    [seen] = compare(
        ids(2), {"candidate": side, "baseline": side}, [PART], primary=PART, confidence=0.95, seed=1
    ).comparisons
    assert (seen.problem, seen.n, seen.num_left_out) == (f"baseline, case c1: {told}", 0, 0)


def test_metric_that_is_only_shown_says_so_and_is_not_counted_among_the_guarded() -> None:
    shown = Metric("shown", "higher", "", shown_only=True)
    sides = {
        label: tuple(CaseScore(case_id=f"c{i}", values={LOSS: 1.0, "shown": 0.5}) for i in range(4))
        for label in ("candidate", "baseline")
    }
    seen = compare(ids(4), sides, [OF_LOSS, shown], primary=OF_LOSS, confidence=0.95, seed=1)
    assert [c.shown_only for c in seen.comparisons] == [False, True]
    assert seen.num_guarded == 1
    gone = compare(ids(5), sides, [shown], primary=shown, confidence=0.95, seed=1).comparisons[0]
    assert (gone.shown_only, gone.n) == (True, 0)


finite = st.floats(min_value=-1e6, max_value=1e6)
maybe_broken = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf]), st.none(), st.just("error"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(maybe_broken, maybe_broken), min_size=0, max_size=6))
def test_any_broken_case_means_no_promotion(pairs: list[tuple[float | str | None, float | str | None]]) -> None:
    def side(values: list[float | str | None]) -> tuple[CaseScore, ...]:
        made = []
        for number, value in enumerate(values):
            if value == "error":
                made.append(CaseScore(case_id=f"c{number}", error="boom"))
            elif value is not None:
                made.append(CaseScore(case_id=f"c{number}", values={LOSS: float(value)}))
        return tuple(made)

    seen = compared(side([ours for ours, _ in pairs]), side([theirs for _, theirs in pairs]), len(pairs))
    whole = all(isinstance(x, float) and math.isfinite(x) for pair in pairs for x in pair)
    if not whole or len(pairs) < 2:
        assert verdict(seen) is not Decision.PROMOTE
    elif verdict(seen) is Decision.PROMOTE:
        assert sum(float(theirs or 0) - float(ours or 0) for ours, theirs in pairs) > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=2, max_size=8), st.integers(0, 2**32 - 1))
def test_interval_holds_the_mean_turns_with_the_sign_and_repeats(differences: list[float], seed: int) -> None:
    low, high = paired_interval(differences, 0.95, seed)
    slack = 1e-6 * max(1.0, *map(abs, differences))
    assert min(differences) - slack <= low <= high <= max(differences) + slack
    assert paired_interval(differences, 0.95, seed) == (low, high)
    turned_low, turned_high = paired_interval([-d for d in differences], 0.95, seed)
    assert (turned_low, turned_high) == pytest.approx((-high, -low), abs=2 * slack + (high - low) * 0.2)


def test_interval_widens_with_confidence_and_narrows_with_n() -> None:
    rng = random.Random(5)
    sample = [rng.gauss(0.2, 1.0) for _ in range(200)]

    def width(values: list[float], confidence: float) -> float:
        low, high = paired_interval(values, confidence, 1)
        return high - low

    assert width(sample, 0.8) < width(sample, 0.95) < width(sample, 0.99)
    assert width(sample, 0.95) < width(sample[:50], 0.95)


@pytest.mark.parametrize("shape", ["normal", "skewed"])
def test_interval_covers_the_true_mean_about_as_often_as_it_says(shape: str) -> None:
    rng = random.Random(99)
    trials, covered = 100, 0
    for trial in range(trials):
        draw = [rng.gauss(1.0, 1.0) if shape == "normal" else rng.expovariate(1.0) for _ in range(50)]
        low, high = paired_interval(draw, 0.95, trial)
        covered += low <= 1.0 <= high
    assert 0.86 <= covered / trials <= 1.0


def test_interval_of_a_large_sample_is_the_normal_one_and_fits_the_bootstrap() -> None:
    rng = random.Random(3)
    sample = [rng.gauss(0.1, 1.0) for _ in range(5001)]
    low, high = paired_interval(sample, 0.95, 1)
    mean = math.fsum(sample) / len(sample)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in sample) / (len(sample) - 1))
    assert (high - low) / 2 == pytest.approx(1.959964 * deviation / math.sqrt(len(sample)), rel=1e-6)
    assert (low + high) / 2 == pytest.approx(mean)
