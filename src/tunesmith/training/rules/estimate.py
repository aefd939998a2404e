"""How long a run will train: guesses that say what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tunesmith.profiles.profile import HardwareTier, Recipe
from tunesmith.profiles.rules.lock import ArchitectureLock

_CHARACTERS_PER_TOKEN = 3.5
_FLOPS = {
    HardwareTier.CPU: 3e10,
    HardwareTier.SMALL_GPU: 8e12,
    HardwareTier.CONSUMER_GPU: 3e13,
    HardwareTier.DATACENTER_GPU: 2e14,
}
"""Useful operations per second to expect from each tier; rough, and replaced by earlier runs once there are any."""


def num_tokens_of(num_characters: int) -> int:
    """About so many, in the languages and tokenizers that we know."""
    return round(num_characters / _CHARACTERS_PER_TOKEN)


def num_characters_of(num_tokens: int) -> int:
    """About so many, in the languages and tokenizers that we know."""
    return round(num_tokens * _CHARACTERS_PER_TOKEN)


@dataclass(frozen=True)
class Estimate:
    seconds: float
    basis: str


@dataclass(frozen=True)
class Pace:
    """How fast an earlier attempt of the same profile trained: examples it saw over all epochs, and seconds."""

    num_examples: int
    train_s: float


def estimate_training(
    *,
    num_examples: int,
    num_characters: int,
    recipe: Recipe,
    lock: ArchitectureLock,
    tier: HardwareTier,
    earlier: Sequence[Pace],
) -> Estimate:
    """Seconds of training, from earlier runs where there are some, else from the size of model and data."""
    tokens_each = num_characters / _CHARACTERS_PER_TOKEN / max(1, num_examples)
    num_seen = num_examples * recipe.epochs
    if recipe.max_steps is not None:
        num_seen = min(num_seen, recipe.max_steps * max(1.0, recipe.batch_tokens / max(1.0, tokens_each)))
    paces = [pace.train_s / pace.num_examples for pace in earlier if pace.num_examples > 0 and pace.train_s > 0]
    if paces:
        basis = f"the pace of {len(paces)} earlier attempt{'s' if len(paces) > 1 else ''}"
        return Estimate(median(paces) * num_seen, basis)
    operations = 4.0 * _num_parameters(lock) * tokens_each * num_seen
    return Estimate(operations / _FLOPS[tier], f"model size on {tier}; no earlier run")


def _num_parameters(lock: ArchitectureLock) -> float:
    return 12.0 * lock.num_layers * lock.hidden_size**2 + lock.vocab_size * lock.hidden_size
