"""Statistics of the gate: no gain by chance, corrected intervals for many metrics, how many cases would tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.evaluation.evaluators.base import Metric
from tunesmith.evaluation.rules.comparison import Report, compare, guard_confidence, paired_interval
from tunesmith.evaluation.rules.gate import Decision, decide
from tunesmith.evaluation.rules.significance import (
    MeanDifference,
    cases_needed,
    chance_of_gain,
    smallest_visible_gain,
)
from tunesmith.profiles.profile import GateSettings
from tunesmith.programs.protocol import CaseScore

Draw = Callable[[random.Random], tuple[float, float]]
NUM, N = 200, 50


def a_loss(rng: random.Random) -> tuple[float, float]:
    """Two models that are equally good: the case is hard or easy for both, the rest is noise."""
    hard = rng.lognormvariate(0.0, 0.5)
    return hard + rng.gauss(0.0, 0.2), hard + rng.gauss(0.0, 0.2)


def a_match(rng: random.Random) -> tuple[float, float]:
    right = rng.betavariate(2.0, 1.0)
    return float(rng.random() < right), float(rng.random() < right)


def a_score(rng: random.Random) -> tuple[float, float]:
    """Of a verifier: mostly perfect, sometimes a part."""
    return tuple(1.0 if rng.random() < 0.8 else round(rng.random(), 1) for _ in range(2))  # type: ignore[return-value]


SETS: dict[str, tuple[tuple[Metric, Draw], ...]] = {
    "loss": ((Metric("loss", "lower", ""), a_loss),),
    "match": ((Metric("match", "higher", ""), a_match),),
    "mixed": (
        (Metric("loss", "lower", ""), a_loss),
        (Metric("match", "higher", ""), a_match),
        (Metric("sampled", "higher", ""), a_match),
        (Metric("score", "higher", ""), a_score),
    ),
}


def an_aa_report(metrics: tuple[tuple[Metric, Draw], ...], rng: random.Random, seed: int) -> Report:
    drawn = [{metric.name: draw(rng) for metric, draw in metrics} for _ in range(N)]
    sides = {
        label: tuple(
            CaseScore(case_id=f"c{i}", values={name: pair[side] for name, pair in case.items()})
            for i, case in enumerate(drawn)
        )
        for side, label in enumerate(("candidate", "baseline"))
    }
    names = [metric for metric, _ in metrics]
    return compare([f"c{i}" for i in range(N)], sides, names, primary=names[0], confidence=0.95, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_two_hundred_comparisons_of_equals_promote_at_most_five_in_a_hundred(name: str) -> None:
    """Also without a least gain; and no more than that are called worse on a metric beside the primary one."""
    metrics, rng = SETS[name], random.Random(f"equals {name}")
    names = tuple(metric.name for metric, _ in metrics)
    promoted = called_worse = 0
    for trial in range(NUM):
        seen = an_aa_report(metrics, rng, trial)
        gate = GateSettings(primary=names[0], min_gain=0.0, max_drop=1.0)
        promoted += decide(seen, gate, names).decision is Decision.PROMOTE
        called_worse += any(c.guard_high is not None and c.guard_high < 0 for c in seen.comparisons[1:])
    assert promoted <= NUM * 0.05
    assert called_worse <= NUM * 0.05


def enumerated(differences: list[float]) -> float:
    """The sign-flip test read once more: every assignment of signs, counted."""
    total = sum(differences)
    sums = [
        sum(s * abs(d) for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(each >= total - 1e-9 for each in sums) / len(sums)


QUARTERS = st.integers(-12, 12).map(lambda number: number / 4)  # sums are exact, and not all of one parity


@settings(max_examples=100, deadline=None)
@given(st.lists(QUARTERS, min_size=1, max_size=9), st.sampled_from([1.0, 2.0**-20, 2.0**20]))
def test_chance_of_a_gain_is_that_of_all_signs(differences: list[float], scale: float) -> None:
    p = chance_of_gain([d * scale for d in differences], 1)
    assert p == (pytest.approx(enumerated(differences)) if sum(differences) > 0 else 1.0)


@pytest.mark.parametrize(("wins", "losses", "p"), [
    (5, 0, 1 / 32), (6, 0, 1 / 64), (7, 1, 9 / 256), (8, 1, 10 / 512), (1, 0, 0.5), (0, 0, 1.0), (3, 3, 1.0),
    (2, 5, 1.0),
])  # fmt: skip
def test_chance_of_right_and_wrong_answers_is_the_exact_one_of_mcnemar(wins: int, losses: int, p: float) -> None:
    differences = [1.0] * wins + [-1.0] * losses + [0.0] * 40
    assert chance_of_gain(differences, 1) == pytest.approx(p)


def binomial_tail(n: int, wins: int) -> float:
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


def is_drawn(p: float) -> bool:
    """Whether a chance was counted among 2000 draws."""
    return p * 2001 == pytest.approx(round(p * 2001), abs=1e-9)


@pytest.mark.parametrize("n", [13, 40, 5000])
def test_chance_of_differences_of_one_size_is_exact_up_to_a_large_number(n: int) -> None:
    wins = n // 2 + max(1, round(math.sqrt(n) / 2))
    p = chance_of_gain([0.3] * wins + [-0.3] * (n - wins), 1)
    assert 0.05 < p < 0.4
    assert p == pytest.approx(binomial_tail(n, wins), rel=1e-9)


def test_chance_of_very_many_differences_of_one_size_is_that_of_the_normal() -> None:
    p = chance_of_gain([1.0] * 2550 + [-1.0] * 2451, 1)
    assert p == pytest.approx(binomial_tail(5001, 2550), abs=1e-5)
    assert p != binomial_tail(5001, 2550)


def test_twelve_sizes_are_enumerated_thirteen_are_drawn() -> None:
    sizes = [1.0 + number / 16 for number in range(13)]
    twelve = [size if number % 3 else -size for number, size in enumerate(sizes[:12])]
    thirteen = [*twelve, sizes[12]]
    assert chance_of_gain(twelve, 1) == enumerated(twelve)
    assert not is_drawn(chance_of_gain(twelve, 1))
    assert is_drawn(chance_of_gain(thirteen, 1))
    assert chance_of_gain(thirteen, 1) == pytest.approx(enumerated(thirteen), abs=0.03)
    assert chance_of_gain(thirteen, 5) == chance_of_gain(thirteen, 5)


def test_drawn_chance_is_that_of_nearly_equal_sizes_and_never_zero() -> None:
    rng = random.Random(4)
    ones = [1.0] * 24 + [-1.0] * 16
    nearly = [d * rng.uniform(0.999, 1.001) for d in ones]
    assert chance_of_gain(nearly, 1) == pytest.approx((binomial_tail(40, 24) + binomial_tail(40, 25)) / 2, abs=0.03)
    assert chance_of_gain([rng.uniform(0.5, 1.0) for _ in range(30)], 1) == pytest.approx(1 / 2001)


@pytest.mark.parametrize(("n", "drawn"), [(5000, True), (5001, False)])
def test_chance_of_many_sizes_is_drawn_up_to_a_large_number_and_then_normal(n: int, drawn: bool) -> None:
    rng = random.Random(4)
    sizes = [rng.uniform(0.5, 1.5) for _ in range(n)]
    wins = n // 2 + 40
    differences = sizes[:wins] + [-size for size in sizes[wins:]]
    z = sum(differences) / math.sqrt(sum(d * d for d in differences))
    assert 0.3 < z < 2.5  # else this would be asked about nothing
    p = chance_of_gain(differences, 1)
    assert p == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=0.03 if drawn else 1e-9)
    assert is_drawn(p) == drawn


def test_too_few_differing_cases_are_no_proof_however_clear_the_interval() -> None:
    """Five of fifty better and none worse: the bootstrap alone would call it better."""
    sides = {
        "candidate": tuple(CaseScore(case_id=f"c{i}", values={"match": float(i < 5)}) for i in range(50)),
        "baseline": tuple(CaseScore(case_id=f"c{i}", values={"match": 0.0}) for i in range(50)),
    }
    metric = Metric("match", "higher", "")
    seen = compare([f"c{i}" for i in range(50)], sides, [metric], primary=metric, confidence=0.95, seed=1)
    assert (seen.comparisons[0].low or 0.0) > 0.0
    assert decide(seen, GateSettings(primary="match"), ("match",)).decision is Decision.REJECT


def test_guard_interval_is_wider_with_more_metrics_and_the_primary_one_stays() -> None:
    rng = random.Random(8)
    values = [(rng.gauss(0.0, 1.0), 0.0) for _ in range(60)]
    sides = {
        label: tuple(
            CaseScore(case_id=f"c{i}", values={f"m{k}": pair[side] for k in range(30)}) for i, pair in enumerate(values)
        )
        for side, label in enumerate(("candidate", "baseline"))
    }
    by_number = {}
    for number in (1, 2, 3, 30):
        metrics = [Metric(f"m{k}", "higher", "") for k in range(number)]
        by_number[number] = compare(
            [f"c{i}" for i in range(60)], sides, metrics, primary=metrics[0], confidence=0.95, seed=1
        )
    assert [seen.num_guarded for seen in by_number.values()] == [1, 1, 2, 29]
    assert len({(seen.comparisons[0].low, seen.comparisons[0].high) for seen in by_number.values()}) == 1
    last = [seen.comparisons[-1] for seen in by_number.values()]
    widths = [(c.guard_high or 0.0) - (c.guard_low or 0.0) for c in last]
    assert widths[0] == widths[1] == (last[0].high or 0.0) - (last[0].low or 0.0)
    assert widths[1] < widths[2] < widths[3]


def test_guard_confidence_shares_the_doubt_between_the_metrics() -> None:
    assert guard_confidence(0.95, 1) == pytest.approx(0.95)
    assert guard_confidence(0.95, 0) == pytest.approx(0.95)
    assert guard_confidence(0.95, 5) == pytest.approx(0.99)


@pytest.mark.parametrize(("confidence", "first", "last"), [(0.95, 50, 1949), (0.9, 100, 1899), (0.99, 10, 1989)])
def test_interval_leaves_the_same_number_of_resamples_out_at_both_ends(
    confidence: float, first: int, last: int
) -> None:
    rng, sample = random.Random(1), [math.sin(i) for i in range(30)]
    means = sorted(sum(rng.choices(sample, k=30)) / 30 for _ in range(2000))
    assert paired_interval(sample, confidence, 1) == (means[first], means[last])
    assert first == 1999 - last


def test_interval_with_five_resamples_beyond_each_end_is_the_bootstraps_alone() -> None:
    skewed = MeanDifference([0.0] * 9 + [1.0], 3)
    low, high = skewed.interval(0.995)
    assert (low, high) == (skewed._means[5], skewed._means[-6])
    assert low > skewed._normal(0.0025)[0]  # the wider of both would be another


def test_interval_of_two_cases_far_out_is_no_narrower_than_the_normal_one() -> None:
    low, high = paired_interval([0.0, 1.0], 0.9999, 1)
    assert low < 0.0
    assert high > 1.0


@pytest.mark.parametrize(("n", "normal"), [(5000, False), (5001, True)])
def test_interval_is_resampled_up_to_a_large_number_and_then_normal(n: int, normal: bool) -> None:
    rng = random.Random(2)
    measured = MeanDifference([rng.random() for _ in range(n)], 1)
    assert (measured.interval(0.95) == measured._normal((1 - 0.95) / 2)) == normal
    assert ("_means" in vars(measured)) != normal


def test_interval_far_out_is_no_narrower_than_the_normal_one() -> None:
    rng = random.Random(6)
    sample = [rng.gauss(0.0, 1.0) for _ in range(80)]
    mean = math.fsum(sample) / 80
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in sample) / 79 / 80)
    low, high = paired_interval(sample, 0.9999, 1)
    assert low <= mean - 3.89 * error
    assert high >= mean + 3.89 * error
    assert paired_interval([0.5], 0.9999, 1) == (0.5, 0.5)


def test_number_of_cases_needed_really_shows_the_gain_four_times_in_five() -> None:
    rng = random.Random(12)
    pilot = [rng.gauss(0.0, 1.0) for _ in range(100)]
    deviation = math.sqrt(sum(d * d for d in pilot) / 100)
    low, high = paired_interval(pilot, 0.95, 1)
    needed = cases_needed(100, low, high, 0.95, 0.4 * deviation)
    assert needed == 100  # never fewer than there are
    needed = cases_needed(100, low, high, 0.95, 0.2 * deviation)
    assert 150 < needed < 250
    assert smallest_visible_gain(low, high, 0.95) == pytest.approx(0.28 * deviation, rel=0.15)
    shown = 0
    for trial in range(60):
        sample = [rng.gauss(0.2 * deviation, deviation) for _ in range(needed)]
        shown += paired_interval(sample, 0.95, trial)[0] > 0
    assert 38 <= shown <= 58
