"""When a training saves and which checkpoints it keeps: pure decisions, so a clock never changes what is learnt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tunesmith.profiles.profile import Checkpoints


@dataclass(frozen=True)
class SaveContext:
    """The progress of a training between two optimizer steps, as the inputs of a save decision."""

    step: int
    num_steps: int
    since_save_s: float
    """Seconds since the last checkpoint was taken, or since this attempt began."""
    ended_epoch: int | None
    """The pass over the data whose last step was just made, counted from 1; None inside a pass."""
    num_epochs: int


def is_due(policy: Checkpoints, context: SaveContext) -> bool:
    """Whether a checkpoint is due now: by steps, minutes or epochs; always at the last step, never at the start."""
    if context.step == 0:
        return False
    if context.step == context.num_steps:
        return True
    if policy.every_steps is not None and context.step % policy.every_steps == 0:
        return True
    if policy.every_minutes is not None and context.since_save_s >= 60.0 * policy.every_minutes:
        return True
    if policy.every_epochs is None or context.ended_epoch is None:
        return False
    return should_checkpoint(context.ended_epoch, context.num_epochs, policy.every_epochs)


def should_checkpoint(epoch: int, total: int, every: int = 10, is_best: bool = False) -> bool:
    """After an epoch, counted from 1: every so many, the last one, and whenever it is the best so far."""
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    return is_best or epoch == total or epoch % every == 0


def steps_to_delete(steps: Collection[int], best: int | None, last: int, keep: int) -> list[int]:
    """Return the steps whose checkpoints to delete, oldest first; not the best, the last, the `keep` newest others."""
    numbered = sorted(set(steps) - {best, last})
    return numbered[: max(0, len(numbered) - keep)]
