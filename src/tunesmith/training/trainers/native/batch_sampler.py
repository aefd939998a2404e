"""Which examples each optimizer step uses: a function of seed and step alone, so that a position is one number."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy


@dataclass(frozen=True)
class StepBatch:
    """The examples of one optimizer step, as indices, and where in which epoch they lie."""

    epoch: int
    position: int
    """Steps of this epoch that came before."""
    indices: tuple[int, ...]


def epoch_order(num_examples: int, seed: int, epoch: int) -> numpy.ndarray:
    """The permutation of an epoch: a function of seed and epoch alone, so that a run resumes bit for bit."""
    return numpy.random.default_rng([seed, epoch]).permutation(num_examples)


class BatchSampler:
    """Every epoch is a new permutation, split into steps of about `batch_tokens` tokens.

    Steps of an epoch are filled evenly: a small last step would count as much as a full one.
    """

    def __init__(
        self, lengths: Sequence[int], *, seed: int, epochs: float, batch_tokens: int, max_steps: int | None = None
    ) -> None:
        self._lengths = numpy.asarray(lengths, dtype=numpy.int64)
        self._seed, self._epochs, self._batch_tokens = seed, epochs, batch_tokens
        self._cached: tuple[int, list[tuple[int, ...]]] = (-1, [])
        self._ends: list[int] = []
        """By epoch, the number of steps up to its end."""
        for epoch in range(math.ceil(epochs)):
            done = self._ends[-1] if self._ends else 0
            if max_steps is not None and done >= max_steps:
                break
            self._ends.append(done + len(self._steps_of(epoch)))
        planned = self._ends[-1] if self._ends else 0
        self.num_steps = planned if max_steps is None else min(planned, max_steps)

    def batch(self, step: int) -> StepBatch:
        """The examples of a step, counted from 0."""
        epoch = bisect.bisect_right(self._ends, step)
        position = step - (self._ends[epoch - 1] if epoch else 0)
        return StepBatch(epoch, position, self._steps_of(epoch)[position])

    def position_after(self, step: int) -> tuple[int, int]:
        """Return the epoch of the last of `step` steps, and how many of its steps are made."""
        if step == 0:
            return 0, 0
        last = self.batch(step - 1)
        return last.epoch, last.position + 1

    def epoch_ended_by(self, step: int) -> int | None:
        """Return the epoch, counted from 1, that ends with step number `step`; None inside an epoch."""
        if step == 0:
            return None
        epoch = self.batch(step - 1).epoch
        is_edge = step >= self.num_steps or self.batch(step).epoch != epoch
        return epoch + 1 if is_edge else None

    def num_tokens(self, step: int) -> int:
        """Tokens of a step, counted from 0."""
        return int(self._lengths[list(self.batch(step).indices)].sum())

    def used(self) -> list[int]:
        """The examples that any step sees: with `max_steps` or a part of an epoch, not all of them."""
        seen: set[int] = set()
        for step in range(self.num_steps):
            seen.update(self.batch(step).indices)
            if len(seen) == len(self._lengths):
                break
        return sorted(seen)

    def _steps_of(self, epoch: int) -> list[tuple[int, ...]]:
        if self._cached[0] != epoch:
            self._cached = (epoch, self._cut(epoch))
        return self._cached[1]

    def _cut(self, epoch: int) -> list[tuple[int, ...]]:
        order = epoch_order(len(self._lengths), self._seed, epoch)
        share = min(1.0, self._epochs - epoch)
        order = order[: max(1, round(share * len(order)))]
        ends = self._lengths[order].cumsum()
        num = math.ceil(int(ends[-1]) / self._batch_tokens)
        starts = ends - self._lengths[order]
        slots = starts * num // int(ends[-1])  # by where an example begins, so that no slot overflows by more than one
        bounds = numpy.flatnonzero(numpy.diff(slots)) + 1
        return [tuple(part.tolist()) for part in numpy.split(order, bounds)]
