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
from tunesmith.evaluation.rules.significance import cases_needed, chance_of_gain, smallest_visible_gain
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=9))
def test_chance_of_a_gain_is_that_of_all_signs(differences: list[float]) -> None:
    p = chance_of_gain(differences, 1)
    assert p == (pytest.approx(enumerated(differences)) if sum(differences) > 0 else 1.0)


@pytest.mark.parametrize(("wins", "losses", "p"), [
    (5, 0, 1 / 32), (6, 0, 1 / 64), (7, 1, 9 / 256), (8, 1, 10 / 512), (1, 0, 0.5), (0, 0, 1.0), (3, 3, 1.0),
    (2, 5, 1.0),
])  # fmt: skip
def test_chance_of_right_and_wrong_answers_is_the_exact_one_of_mcnemar(wins: int, losses: int, p: float) -> None:
    differences = [1.0] * wins + [-1.0] * losses + [0.0] * 40
    assert chance_of_gain(differences, 1) == pytest.approx(p)


def test_chance_drawn_and_by_the_normal_agree_with_the_exact_one() -> None:
    rng = random.Random(4)
    ones = [rng.choice([1.0, 1.0, 1.0, -1.0, -1.0]) for _ in range(40)]
    nearly = [d * rng.uniform(0.999, 1.001) for d in ones]  # no longer all of one size: drawn
    assert chance_of_gain(nearly, 1) == pytest.approx(chance_of_gain(ones, 1), abs=0.02)
    clear = [rng.uniform(0.5, 1.0) for _ in range(30)]
    assert chance_of_gain(clear, 1) == pytest.approx(1 / 2001)
    for size in (1.0, None):  # of one size, and of many
        many = [rng.choice([1.0, -1.0]) * (size or rng.uniform(0.5, 1.5)) for _ in range(6000)]
        lifted = [d + 0.0 for d in many]
        lifted[:60] = [abs(d) for d in lifted[:60]]
        z = sum(lifted) / math.sqrt(sum(d * d for d in lifted))
        expected = 0.5 * math.erfc(z / math.sqrt(2)) if z > 0 else 1.0
        assert chance_of_gain(lifted, 1) == pytest.approx(expected, abs=0.01)
    assert chance_of_gain(clear, 5) == chance_of_gain(clear, 5)


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
