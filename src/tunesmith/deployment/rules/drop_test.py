"""A sequential test of "the live mean is lower than the baseline's mean by more than d", for values from 0 to 1.

Two betting e-processes share one unknown: the baseline's true mean m. `_against_lower(m)` bets on the baseline's values
that their mean is above m, and `_against_higher(m - d)` bets on the live values that their mean is below m - d. If the
live mean is at least m - d, the expected value of their product is at most 1, at every look, for the true m. So is its
least value over all m, and by Ville's inequality it ever reaches 1 / alpha with a probability of at most alpha: however
often somebody looks, and however small the baseline is. Both processes mix fixed bets, so that only how often each
value occurred counts, never its order. See docs/watch.md. Pure Python: a worker need not have numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_BETS = (0.03, 0.08, 0.2, 0.5)
"""Shares of the largest bet that cannot go below zero; each has the same weight."""
_NARROWEST = 1e-3
_FEW_POINTS = tuple(number / 8 for number in range(9))

Counts = Mapping[float, int]
"""How often each value from 0 to 1 occurred."""


def counts_of(values: Iterable[float | None]) -> dict[float, int]:
    """How often each value occurred. A missing score, NaN and anything outside of 0..1 is left out."""
    counts: dict[float, int] = {}
    for value in values:
        if value is not None and math.isfinite(value) and 0.0 <= value <= 1.0:
            counts[float(value)] = counts.get(float(value), 0) + 1
    return counts


def num_of(counts: Counts) -> int:
    return sum(counts.values())


def mean_of(counts: Counts) -> float:
    """The mean; NaN where there is no value."""
    num = num_of(counts)
    return math.fsum(value * times for value, times in counts.items()) / num if num else math.nan


@dataclass(frozen=True)
class DropTest:
    """What the values of both windows say about a drop."""

    baseline: Counts
    live: Counts

    def has_dropped(self, max_drop: float, alpha: float) -> bool:
        """Whether the live mean is shown to be lower by more than `max_drop`; wrong with probability `alpha` at most.

        Always False where the live mean of the sample is not lower by more than `max_drop`.
        """
        if not self.baseline or not self.live:
            return False
        needed = -math.log(alpha)
        high, low = mean_of(self.baseline), mean_of(self.live) + max_drop
        if low >= high:
            return False
        if any(self._log_product(low + (high - low) * part, max_drop) < needed for part in _FEW_POINTS):
            return False
        return self._is_above(0.0, 1.0, max_drop, needed)

    def least_drop(self, alpha: float) -> float:
        """A lower confidence bound of the drop: the largest multiple of 0.005 that `has_dropped` finds exceeded."""
        low, high = 0, 200
        if not self.has_dropped(0.0, alpha):
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.has_dropped(middle / 200, alpha) else (low, middle)
        return low / 200

    def _is_above(self, begin: float, end: float, max_drop: float, needed: float) -> bool:
        """Whether the product is above for every mean between two; one process falls with the mean, the other rises."""
        worst = _log_bets(self.baseline, end) + _log_bets(_mirrored(self.live), 1.0 - max(begin - max_drop, 0.0))
        if worst >= needed:
            return True
        if end - begin < _NARROWEST:
            return False
        middle = (begin + end) / 2
        if self._log_product(middle, max_drop) < needed:
            return False
        return self._is_above(begin, middle, max_drop, needed) and self._is_above(middle, end, max_drop, needed)

    def _log_product(self, mean: float, max_drop: float) -> float:
        return _log_bets(self.baseline, mean) + _log_bets(_mirrored(self.live), 1.0 - max(mean - max_drop, 0.0))


def _mirrored(counts: Counts) -> Counts:
    return {1.0 - value: times for value, times in counts.items()}


def _log_bets(counts: Counts, mean: float) -> float:
    """The logarithm of what betting on "the mean is higher than this" has won; its expected win is 1 if it is not."""
    if mean <= 0.0:
        return math.inf if any(value > 0.0 for value in counts) else 0.0
    logs = []
    for bet in _BETS:
        logs.append(sum(times * math.log1p(bet * (value / mean - 1.0)) for value, times in counts.items()))
    largest = max(logs)
    return largest + math.log(sum(math.exp(log - largest) for log in logs) / len(_BETS))


def has_low_mean(counts: Counts, least: float, alpha: float) -> bool:
    """Whether the mean is shown to be below `least`, at any number of looks; wrong with probability `alpha` at most."""
    return bool(counts) and _log_bets(_mirrored(counts), 1.0 - least) >= -math.log(alpha)
