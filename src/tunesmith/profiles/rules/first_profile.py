"""Numbers of a first profile: shares with which its first round can be judged, lengths, the tier of a device. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tunesmith.profiles.profile import FAMILIES, HardwareTier, Role

MIN_CASES = 20
"""Held-out cases of a first gate: fewer pairs tell too little of a gain from chance, more make the first round wait."""
MAX_LENGTH, MAX_TOKENS = 2048, 256
_VALIDATION = 0.05
_SURE = 0.95
_STEP, _MOST = 5, 50  # percent


@dataclass(frozen=True)
class Shares:
    """How prompts are split, and how many held-out cases the gate wants."""

    heldout: float
    validation: float
    min_cases: int

    def expected_cases(self, num_new: int) -> int:
        return round(num_new * self.heldout)


def choose_shares(num_new: int, min_new: int, min_cases: int = MIN_CASES) -> Shares | None:
    """The smallest held-out share with which `num_new` different prompts can be trained on and judged.

    A prompt is held out by its hash, so the number is a matter of chance: at least `min_cases` are held out, and at
    least `min_new` left to train on, each in 95 of 100 workspaces. None: no share up to a half does both.
    """
    for percent in range(_STEP, _MOST + _STEP, _STEP):
        heldout = percent / 100
        trained = 1.0 - heldout - _VALIDATION
        enough_cases = at_least(min_cases, num_new, heldout)
        if enough_cases >= _SURE and at_least(min_new, num_new, trained) >= _SURE:
            return Shares(heldout, _VALIDATION, min_cases)
    return None


def at_least(wanted: int, num: int, share: float) -> float:
    """How likely it is that `wanted` or more of `num` are drawn, each with the probability `share`."""
    return math.fsum(math.comb(num, k) * share**k * (1.0 - share) ** (num - k) for k in range(wanted, num + 1))


def longest_example(context: int) -> int:
    return min(MAX_LENGTH, context)


def longest_answer(context: int) -> int:
    """For requests that name no limit; the other half of a short context is for the question."""
    return max(1, min(MAX_TOKENS, context // 2))


def role_for(family: str) -> Role | None:
    """The first role that may use a model family; None: no role may."""
    return next((role for role in Role if family in FAMILIES[role]), None)


def tier_of(gpu_gb: float | None) -> HardwareTier:
    """The tier of a GPU by its memory in GB of 2^30 bytes; None: there is no GPU."""
    if gpu_gb is None:
        return HardwareTier.CPU
    if gpu_gb <= 12.5:  # a card that is sold with 12 GB
        return HardwareTier.SMALL_GPU
    return HardwareTier.CONSUMER_GPU if gpu_gb <= 32.5 else HardwareTier.DATACENTER_GPU
