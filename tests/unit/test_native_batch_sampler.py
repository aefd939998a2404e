"""The order of examples, the learning rate, and what counts as best: pure arithmetic of the native trainer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.native import a_recipe
from tunesmith.training.trainers.native.batch_sampler import BatchSampler
from tunesmith.training.trainers.native.optimizer import learning_rate
from tunesmith.training.trainers.native.validation import chosen_cases, is_better

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=50)


def batches(order: BatchSampler) -> list[tuple[int, ...]]:
    return [order.batch(step).indices for step in range(order.num_steps)]


@given(LENGTHS, st.integers(1, 300), st.integers(0, 5))
def test_every_epoch_holds_every_example_once(lengths: list[int], batch_tokens: int, seed: int) -> None:
    order = BatchSampler(lengths, seed=seed, epochs=3, batch_tokens=batch_tokens)
    by_epoch: dict[int, list[int]] = {}
    for step in range(order.num_steps):
        batch = order.batch(step)
        assert batch.indices
        by_epoch.setdefault(batch.epoch, []).extend(batch.indices)
    assert sorted(by_epoch) == [0, 1, 2]
    assert all(sorted(indices) == list(range(len(lengths))) for indices in by_epoch.values())


@given(LENGTHS, st.integers(10, 300))
def test_no_step_is_larger_than_asked_by_more_than_an_example(lengths: list[int], batch_tokens: int) -> None:
    order = BatchSampler(lengths, seed=1, epochs=1, batch_tokens=batch_tokens)
    for indices in batches(order):
        assert sum(lengths[index] for index in indices) < batch_tokens + max(lengths)


def test_order_is_a_function_of_seed_and_step() -> None:
    lengths = list(range(5, 45))
    one = BatchSampler(lengths, seed=1, epochs=4, batch_tokens=100)
    again = BatchSampler(lengths, seed=1, epochs=4, batch_tokens=100)
    backwards = [again.batch(step).indices for step in reversed(range(again.num_steps))]
    assert batches(one) == backwards[::-1]
    assert batches(one) != batches(BatchSampler(lengths, seed=2, epochs=4, batch_tokens=100))
    assert one.batch(0).indices != one.batch(one.num_steps // 4).indices


def test_half_an_epoch_is_half_of_the_examples() -> None:
    order = BatchSampler([10] * 40, seed=1, epochs=1.5, batch_tokens=100)
    assert sum(len(indices) for indices in batches(order)) == 60


def test_max_steps_limits_whatever_the_epochs_say() -> None:
    assert BatchSampler([10] * 40, seed=1, epochs=1000, batch_tokens=100, max_steps=7).num_steps == 7
    assert BatchSampler([10] * 40, seed=1, epochs=1, batch_tokens=100, max_steps=7).num_steps == 4


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_rises_then_falls_and_is_never_0(schedule: str) -> None:
    recipe = a_recipe(lr=1e-2, warmup=0.1, schedule=schedule)
    rates = [learning_rate(recipe, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3)
    assert max(rates) == pytest.approx(1e-2)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates) > 0


@pytest.mark.parametrize(
    ("value", "best", "direction", "expected"),
    [
        (1.0, None, "lower", True),
        (math.nan, None, "lower", False),
        (math.inf, None, "higher", False),
        (1.0, 2.0, "lower", True),
        (1.0, 2.0, "higher", False),
        (2.0, 1.0, "higher", True),
        (1.0, 1.0, "lower", False),
        (math.nan, 1.0, "higher", False),
    ],
)
def test_best_follows_the_declared_direction_and_is_finite(
    value: float, best: float | None, direction: str, expected: bool
) -> None:
    assert is_better(value, best, direction) is expected


def test_validation_cases_are_fixed_and_at_most_as_many_as_asked() -> None:
    assert chosen_cases(5, 10, seed=1) == [0, 1, 2, 3, 4]
    chosen = chosen_cases(1000, 50, seed=1)
    assert chosen == chosen_cases(1000, 50, seed=1) == sorted(set(chosen))
    assert len(chosen) == 50


def test_used_names_only_what_some_step_sees() -> None:
    order = BatchSampler([10] * 100, seed=1, epochs=1, batch_tokens=50, max_steps=3)
    seen = {index for step in range(order.num_steps) for index in order.batch(step).indices}
    assert order.used() == sorted(seen)
    assert 10 <= len(seen) <= 20
    assert BatchSampler([10] * 100, seed=1, epochs=3, batch_tokens=50).used() == list(range(100))


def test_place_and_ends_of_epochs_follow_from_the_step() -> None:
    order = BatchSampler([10] * 20, seed=1, epochs=2.5, batch_tokens=50)
    places = [order.position_after(step) for step in range(order.num_steps + 1)]
    assert places[0] == (0, 0)
    assert len(set(places)) == len(places)
    assert places == sorted(places)
    ended = {step: order.epoch_ended_by(step) for step in range(order.num_steps + 1) if order.epoch_ended_by(step)}
    assert list(ended.values()) == [1, 2, 3]
    assert max(ended) == order.num_steps
    assert sum(order.num_tokens(step) for step in range(order.num_steps)) == 500
