"""When a training saves and which checkpoints stay: pure decisions, so that a clock can never change what is learnt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tunesmith.profiles.profile import Checkpoints


@dataclass(frozen=True)
class Moment:
    """Where a training stands between two optimizer steps, as far as saving is concerned."""

    step: int
    num_steps: int
    since_save_s: float
    """Seconds since the last checkpoint was taken, or since this attempt began."""
    ended_epoch: int | None
    """The pass over the data whose last step was just made, counted from 1; None inside a pass."""
    num_epochs: int


def is_due(policy: Checkpoints, moment: Moment) -> bool:
    """Whether any of the declared rhythms asks for a checkpoint now; the last step always does, the start never."""
    if moment.step == 0:
        return False
    if moment.step == moment.num_steps:
        return True
    if policy.every_steps is not None and moment.step % policy.every_steps == 0:
        return True
    if policy.every_minutes is not None and moment.since_save_s >= 60.0 * policy.every_minutes:
        return True
    if policy.every_epochs is None or moment.ended_epoch is None:
        return False
    return should_checkpoint(moment.ended_epoch, moment.num_epochs, policy.every_epochs)


def should_checkpoint(epoch: int, total: int, every: int = 10, is_best: bool = False) -> bool:
    """After an epoch, counted from 1: every so many, the last one, and whenever it is the best so far."""
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    return is_best or epoch == total or epoch % every == 0


def to_remove(steps: Collection[int], best: int | None, last: int, keep: int) -> list[int]:
    """The steps whose checkpoints may go, oldest first: all but the best, the last and the `keep` newest besides."""
    numbered = sorted(set(steps) - {best, last})
    return numbered[: max(0, len(numbered) - keep)]
