"""A campaign's breaker and counters, as pure values; the same through the store is in test_transitions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tunesmith.profiles.rules.campaign import (
    BREAKER_COOLDOWN,
    FAILURES_FORGOTTEN_AFTER,
    FAILURES_TO_OPEN,
    Breaker,
    CounterEffect,
    Counters,
    after_end,
    breaker,
)
from tunesmith.runs.rules.run import RUN, DataEffect, RunState, effect_of_end

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def failed(*ages: timedelta) -> Counters:
    """Failures that happened that long ago, oldest first."""
    return Counters(failures=tuple(NOW - age for age in ages))


def test_limits_are_those_of_the_design() -> None:
    assert (3, timedelta(days=7)) == (FAILURES_TO_OPEN, FAILURES_FORGOTTEN_AFTER)


@pytest.mark.parametrize(
    ("ages_h", "expected"),
    [
        ([], Breaker.CLOSED),
        ([1], Breaker.CLOSED),
        ([2, 1], Breaker.CLOSED),
        ([3, 2, 1], Breaker.OPEN),
        ([4, 3, 2, 1], Breaker.OPEN),
        ([30, 20, 6], Breaker.HALF_OPEN),
        ([30, 20, 5.99], Breaker.OPEN),
        ([168, 2, 1], Breaker.CLOSED),  # seven days old: forgotten
        ([167.9, 2, 1], Breaker.OPEN),
        ([200, 190, 180], Breaker.CLOSED),
    ],
)
def test_breaker_by_the_age_of_failures(ages_h: list[float], expected: Breaker) -> None:
    assert breaker(failed(*(timedelta(hours=age) for age in ages_h)), NOW) is expected


def test_half_open_opens_again_with_one_more_failure() -> None:
    counters = failed(timedelta(hours=30), timedelta(hours=20), BREAKER_COOLDOWN)
    assert breaker(counters, NOW) is Breaker.HALF_OPEN
    assert breaker(after_end(counters, CounterEffect.FAILURE, NOW), NOW) is Breaker.OPEN


def test_success_closes_the_breaker_and_forgets_rejections() -> None:
    counters = Counters(failures=(NOW,) * 5, num_rejections=3, last_rejected_at=NOW)
    after = after_end(counters, CounterEffect.SUCCESS, NOW)
    assert (after.failures, after.num_rejections, after.last_success_at) == ((), 0, NOW)
    assert breaker(after, NOW) is Breaker.CLOSED


def test_rejection_has_its_own_counter_and_never_touches_the_breaker() -> None:
    counters = failed(timedelta(hours=2), timedelta(hours=1))
    for number in range(1, 10):
        counters = after_end(counters, CounterEffect.REJECTION, NOW)
        assert (counters.num_rejections, counters.last_rejected_at) == (number, NOW)
        assert breaker(counters, NOW) is Breaker.CLOSED
    assert len(counters.failures) == 2


def test_failure_drops_what_is_forgotten_so_that_the_list_stays_short() -> None:
    counters = failed(*(timedelta(days=days) for days in range(100, 0, -1)))
    after = after_end(counters, CounterEffect.FAILURE, NOW)
    assert len(after.failures) == 7  # six days back, and now


def test_end_without_effect_changes_nothing() -> None:
    counters = Counters(failures=(NOW,), num_rejections=1, last_rejected_at=NOW)
    assert after_end(counters, CounterEffect.NONE, NOW) is counters


@pytest.mark.parametrize(
    ("end", "data", "effect"),
    [
        ("deployed", "consume", "success"),
        ("completed", "consume", "success"),
        ("rejected", "release_and_count", "rejection"),
        ("rolled_back", "release_and_count", "rejection"),
        ("failed", "release", "failure"),
        ("validated", "release", "none"),
        ("cancelled", "release", "none"),
        ("skipped", "release", "none"),
    ],
)
def test_effect_of_each_end(end: str, data: str, effect: str) -> None:
    found = effect_of_end(RunState(end))
    assert (found.data, found.counters) == (DataEffect(data), CounterEffect(effect))


@pytest.mark.parametrize("state", sorted(RUN.unfinished))
def test_unfinished_state_has_no_effect(state: RunState) -> None:
    with pytest.raises(ValueError, match="has not ended"):
        effect_of_end(state)
