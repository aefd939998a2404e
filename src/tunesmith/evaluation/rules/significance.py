"""Statistics of paired differences: an interval of their mean, a test against chance, how many cases would tell.

Every function takes differences that are turned so that positive is better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from statistics import NormalDist

_RESAMPLES = 2000
_LARGE_N = 5000  # beyond it the mean is normal enough, and resampling only costs time
_MIN_IN_TAIL = 5  # resamples beyond an end of the interval; with fewer, the bootstrap says little about that end
_MAX_ENUMERATED = 12  # 2^12 signs are quicker to list than 2000 to draw
_POWER = 0.8
_IS_ONE = bytes(value == ord("1") for value in range(256))
_SLACK = 1e-9  # sums of the same numbers in another order


class MeanDifference:
    """The mean of paired differences, resampled once, however many intervals are asked for."""

    def __init__(self, differences: Sequence[float], seed: int) -> None:
        self._differences = differences
        self._seed = seed
        self.mean = math.fsum(differences) / len(differences)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Confidence interval of the mean: bootstrap percentiles, or the normal one where n is large.

        Where the bootstrap has too few resamples beyond its ends, the wider of both at each end.
        """
        tail = (1 - confidence) / 2
        if len(self._differences) > _LARGE_N:
            return self._normal(tail)
        num_outside = int(tail * _RESAMPLES + _SLACK)  # at each end
        low, high = self._means[num_outside], self._means[-1 - num_outside]
        if tail * _RESAMPLES >= _MIN_IN_TAIL or len(self._differences) < 2:
            return low, high
        normal_low, normal_high = self._normal(tail)
        return min(low, normal_low), max(high, normal_high)

    @cached_property
    def _means(self) -> list[float]:
        rng, n = random.Random(self._seed), len(self._differences)  # noqa: S311 - resampling, not secrecy
        return sorted(sum(rng.choices(self._differences, k=n)) / n for _ in range(_RESAMPLES))

    def _normal(self, tail: float) -> tuple[float, float]:
        n = len(self._differences)
        error = math.sqrt(math.fsum((d - self.mean) ** 2 for d in self._differences) / (n - 1) / n)
        reach = NormalDist().inv_cdf(1 - tail) * error
        return self.mean - reach, self.mean + reach


def chance_of_gain(differences: Sequence[float], seed: int) -> float:
    """One-sided p-value of the sign-flip test: how often chance alone gives a mean at least as good as this one.

    If both sides are equally good, each difference is as likely to have the other sign. Exact for a few cases and for
    right-or-wrong metrics (McNemar's test); otherwise estimated, and never below 1 / 2001.
    """
    sizes = [abs(d) for d in differences if d]
    total = math.fsum(differences)
    if not sizes or total <= 0.0:
        return 1.0
    at_least = total - _SLACK * math.fsum(sizes)
    if min(sizes) == max(sizes):
        return _binomial_tail(len(sizes), round((total / sizes[0] + len(sizes)) / 2))
    if len(sizes) <= _MAX_ENUMERATED:
        sums = [0.0]
        for size in sizes:
            sums = [known + signed for known in sums for signed in (size, -size)]
        return sum(each >= at_least for each in sums) / len(sums)
    if len(sizes) > _LARGE_N:
        return 1.0 - NormalDist().cdf(total / math.sqrt(math.fsum(size * size for size in sizes)))
    return _drawn_tail(sizes, at_least, seed)


def _binomial_tail(n: int, wins: int) -> float:
    """Chance of at least so many heads in n throws of a fair coin."""
    if n > _LARGE_N:
        return 1.0 - NormalDist(n / 2, math.sqrt(n) / 2).cdf(wins - 0.5)
    return float(sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n)


def _drawn_tail(sizes: Sequence[float], at_least: float, seed: int) -> float:
    rng = random.Random(seed)  # noqa: S311 - resampling, not secrecy
    total, hits = math.fsum(sizes), 0
    for _ in range(_RESAMPLES):
        signs = f"{rng.getrandbits(len(sizes)):0{len(sizes)}b}".encode().translate(_IS_ONE)
        hits += total - 2 * sum(compress(sizes, signs)) >= at_least
    return (hits + 1) / (_RESAMPLES + 1)


def cases_needed(n: int, low: float, high: float, confidence: float, gain: float) -> int:
    """About how many cases show a gain of this size four times in five, judged by the interval that n cases gave."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    reach = (high - low) / 2 * (z + NormalDist().inv_cdf(_POWER)) / z
    return max(n, math.ceil(n * (reach / gain) ** 2))


def smallest_visible_gain(low: float, high: float, confidence: float) -> float:
    """The gain that as many cases as gave this interval show four times in five."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return (high - low) / 2 * (z + NormalDist().inv_cdf(_POWER)) / z
