"""What a trainer declares about itself: the contract that the registry lists and that `plan` checks before queueing."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.profiles.profile import HardwareTier, Method

ALL_TIERS = frozenset(HardwareTier)


@dataclass(frozen=True)
class TrainerInfo:
    """A trainer by name: where it can run, what it can do, and how to start it."""

    name: str
    tiers: frozenset[HardwareTier]
    default_tier: HardwareTier
    methods: frozenset[Method]
    argv: tuple[str, ...]
    """The command; a first element "python" stands for the running interpreter. Empty: `trainer.options` say it."""
    description: str
    takes_options: bool = True
    """Whether `trainer.options` of a profile mean anything to it."""
    tunings: frozenset[str] = frozenset({"lora"})
    """What it can train (`recipe.tuning`)."""
    quantizations: frozenset[str] = frozenset({"none"})
    """How it can hold the base while it trains (`recipe.quantize`)."""
    measures: frozenset[str] = frozenset()
    """What its validation measures (`validation.best_metric`); empty: whatever the program tells."""
    max_processes: int = 1
    """How many processes can train together (`hardware.processes`)."""
    module: str | None = None
    """Ours only: the module whose `train(program)` the entry point calls."""
