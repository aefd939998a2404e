"""The sequential test of a drop: wrong as rarely as it says, however often it is asked, and quick with real drops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.deployment.rules.drop_test import DropTest, counts_of, has_low_mean, mean_of, num_of

VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=60)
Draw = Callable[[random.Random], float]


def coin(chance: float) -> Draw:
    return lambda rng: float(rng.random() < chance)


def ratings(rng: random.Random) -> float:
    """Helpful, partial, irrelevant."""
    return rng.choices([1.0, 0.5, 0.0], [6, 3, 1])[0]


def shares(rng: random.Random) -> float:
    """As entity preservation: many different values."""
    parts = rng.randint(1, 12)
    return sum(rng.random() < 0.9 for _ in range(parts)) / parts


def answers_until_found(
    rng: random.Random, before: Draw, live: Draw, *, baseline: int, most: int, max_drop: float, alpha: float, every: int
) -> int | None:
    """After how many live answers the drop is found, looked for after every few answers; None: not by then."""
    old = counts_of(before(rng) for _ in range(baseline))
    new: dict[float, int] = {}
    for number in range(1, most + 1):
        value = live(rng)
        new[value] = new.get(value, 0) + 1
        if number % every == 0 and DropTest(old, new).has_dropped(max_drop, alpha):
            return number
    return None


@pytest.mark.parametrize("draw", [coin(0.85), coin(0.5), coin(0.99), ratings, shares])
@pytest.mark.parametrize("baseline", [50, 1000])
def test_healthy_answers_are_rarely_called_a_drop_though_every_answer_is_looked_at(draw: Draw, baseline: int) -> None:
    rng = random.Random(7)
    found = [
        answers_until_found(rng, draw, draw, baseline=baseline, most=150, max_drop=0.0, alpha=0.05, every=1)
        for _ in range(40)
    ]
    assert sum(each is not None for each in found) <= 4, "alpha is 0.05, and it may not be exceeded by chance alone"


def test_drop_of_15_points_is_found_within_500_answers() -> None:
    rng = random.Random(11)
    found = [
        answers_until_found(
            rng, coin(0.85), coin(0.7), baseline=1000, most=500, max_drop=0.02, alpha=0.05 / 6, every=25
        )
        for _ in range(100)
    ]
    assert sum(each is not None for each in found) >= 95


def test_broken_version_is_found_within_ten_answers() -> None:
    old = counts_of([1.0] * 970 + [0.0] * 30)
    assert DropTest(old, {0.0: 10}).has_dropped(0.02, 0.01)
    assert DropTest(old, {0.0: 10}).least_drop(0.01) > 0.25
    assert DropTest({1.0: 50}, {0.0: 10}).has_dropped(0.02, 0.01), "50 answers before are enough for that"


@settings(max_examples=300, deadline=None)
@given(VALUES, VALUES, st.sampled_from([0.0, 0.02, 0.1]))
def test_no_drop_in_the_samples_is_never_a_drop(old: list[float], new: list[float], max_drop: float) -> None:
    test = DropTest(counts_of(old), counts_of(new))
    if not old or not new or mean_of(test.live) >= mean_of(test.baseline) - max_drop:
        assert not test.has_dropped(max_drop, 0.5)
    assert not DropTest(test.baseline, test.baseline).has_dropped(max_drop, 0.9)


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES, st.randoms())
def test_order_of_answers_makes_no_difference(old: list[float], new: list[float], rng: random.Random) -> None:
    shuffled = [list(old), list(new)]
    for each in shuffled:
        rng.shuffle(each)
    one, other = DropTest(counts_of(old), counts_of(new)), DropTest(*map(counts_of, shuffled))
    assert one.has_dropped(0.02, 0.05) == other.has_dropped(0.02, 0.05)


WORSE = st.tuples(
    st.fixed_dictionaries({0.0: st.integers(1, 30), 0.5: st.integers(1, 30), 1.0: st.integers(60, 300)}),
    st.fixed_dictionaries({0.0: st.integers(30, 150), 0.5: st.integers(1, 30), 1.0: st.integers(1, 60)}),
)
"""Windows before and after a flip that made things worse."""
BETS = (0.03, 0.08, 0.2, 0.5)


def least_log_product(old: dict[float, int], new: dict[float, int], max_drop: float) -> float:
    """The same by trying out every mean, written down once more from docs/watch.md."""

    def won(counts: dict[float, int], mean: float, sign: float, room: float) -> float:
        logs = [
            sum(num * math.log(1.0 + bet * sign * (value - mean) / room) for value, num in counts.items())
            for bet in BETS
        ]
        return max(logs) + math.log(sum(math.exp(log - max(logs)) for log in logs) / len(BETS))

    means = [number / 2000 for number in range(1, 2000)]
    lower = {mean: max(mean - max_drop, 0.0) for mean in means}
    return min(won(old, mean, 1.0, mean) + won(new, lower[mean], -1.0, 1.0 - lower[mean]) for mean in means)


@settings(max_examples=40, deadline=None)
@given(WORSE, st.sampled_from([0.0, 0.02, 0.1]))
def test_decision_is_that_of_the_least_favourable_mean(
    windows: tuple[dict[float, int], dict[float, int]], max_drop: float
) -> None:
    least = least_log_product(*windows, max_drop)
    test = DropTest(*windows)
    if least > 0.5:
        assert test.has_dropped(max_drop, math.exp(-0.97 * least + 0.05)), "only the width of a step is given away"
    assert not test.has_dropped(max_drop, math.exp(-max(least, 0.0) - 0.001))


@settings(max_examples=40, deadline=None)
@given(WORSE, st.floats(0.001, 0.2))
def test_bound_is_the_largest_drop_that_is_shown(
    windows: tuple[dict[float, int], dict[float, int]], alpha: float
) -> None:
    test = DropTest(*windows)
    bound = test.least_drop(alpha)
    assert bound <= max(0.0, mean_of(test.baseline) - mean_of(test.live))
    assert not test.has_dropped(bound + 0.0051, alpha)
    if test.has_dropped(0.005, alpha):
        assert bound >= 0.005
        assert test.has_dropped(bound, alpha)


def test_nothing_before_or_since_is_no_drop_and_has_no_bound() -> None:
    for test in (DropTest({}, {}), DropTest({1.0: 100}, {}), DropTest({}, {0.0: 100})):
        assert not test.has_dropped(0.0, 0.9)
        assert test.least_drop(0.9) == 0.0


@settings(max_examples=100, deadline=None)
@given(VALUES, st.lists(st.sampled_from([None, math.nan, math.inf, -math.inf, -0.1, 1.1]), max_size=20))
def test_what_is_no_score_counts_neither_as_good_nor_as_bad(values: list[float], none: list[float | None]) -> None:
    counts = counts_of([*none, *values, *none])
    assert counts == counts_of(values)
    assert num_of(counts) == len(values)
    assert math.isnan(mean_of(counts_of(none)))
    assert not DropTest(counts_of([1.0] * 100), counts_of(none)).has_dropped(0.0, 0.5)
    assert not DropTest(counts_of(none), counts_of([0.0] * 100)).has_dropped(0.0, 0.5)


def test_low_mean_is_shown_by_values_alone() -> None:
    assert not has_low_mean({}, 0.5, 0.05)
    assert not has_low_mean({0.0: 2, 1.0: 1}, 0.5, 0.05)
    assert has_low_mean({0.0: 30, 1.0: 2}, 0.5, 0.005)
    rng = random.Random(3)
    for _ in range(100):
        counts = {0.0: 0, 1.0: 0}
        for _ in range(200):
            counts[float(rng.random() < 0.5)] += 1
        assert not has_low_mean({value: num for value, num in counts.items() if num}, 0.5, 0.001)


def test_look_at_large_windows_is_quick() -> None:
    """Many different scores in both windows: the worst case of one look."""
    from time import process_time

    rng = random.Random(5)
    test = DropTest(counts_of(rng.random() for _ in range(1000)), counts_of(0.9 * rng.random() for _ in range(2000)))
    begin = process_time()
    test.has_dropped(0.02, 0.01)
    assert process_time() - begin < 1.0


@pytest.mark.soak
@pytest.mark.parametrize("draw", [coin(0.85), coin(0.5), coin(0.99), ratings, shares])
def test_soak_200_healthy_samples_of_1000_answers(draw: Draw) -> None:
    """Looked at after every answer, with no drop allowed."""
    rng = random.Random(23)
    false = [
        answers_until_found(rng, draw, draw, baseline=1000, most=1000, max_drop=0.0, alpha=0.05, every=1)
        for _ in range(200)
    ]
    assert sum(each is not None for each in false) <= 10
