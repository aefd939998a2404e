"""Which examples each optimizer step uses, and in which micro-batches: a function of seed and step alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from tunesmith.profiles.profile import Recipe
from tunesmith.training.rules.memory_plan import UNPLANNED_PACK_TOKENS
from tunesmith.training.trainers.native.batch_sampler import epoch_order


@dataclass(frozen=True)
class MicroBatches:
    """How TRL splits a step: `num` forward passes of `size` examples each."""

    size: int
    num: int

    @property
    def per_step(self) -> int:
        return self.size * self.num


class Plan:
    """Pass after pass over the examples, each in an order of its own, cut into steps of equally many examples.

    The recipe speaks of tokens and TRL of examples: a step has as many examples as have `batch_tokens` tokens on
    average, a forward pass so few that even the longest ones stay within `micro_batch_tokens`. Steps are never partly
    filled: the last one takes what it lacks from the beginning of one more pass.
    """

    def __init__(self, lengths: Sequence[int], longest: int, recipe: Recipe, divisor: int = 1) -> None:
        self._lengths = numpy.asarray(lengths, dtype=numpy.int64)
        self._seed = recipe.seed
        self._orders: dict[int, numpy.ndarray] = {}
        self.micro_batches = _micro_batches(self._lengths, longest, recipe, divisor)
        planned = math.ceil(recipe.epochs * len(lengths) / self.micro_batches.per_step)
        self.num_steps = max(1, planned if recipe.max_steps is None else min(planned, recipe.max_steps))

    def step(self, step: int) -> list[int]:
        """The examples of a step, counted from 0; short ones first, so that little padding is needed."""
        first = step * self.micro_batches.per_step
        chosen = [self._at(index) for index in range(first, first + self.micro_batches.per_step)]
        return sorted(chosen, key=lambda index: (int(self._lengths[index]), index))

    def position_after(self, step: int) -> tuple[int, int]:
        """Return the epochs completed after `step` steps, and the examples used of the next one."""
        return divmod(step * self.micro_batches.per_step, len(self._lengths))

    def epoch_ended_by(self, step: int) -> int | None:
        """The pass over the data, counted from 1, whose end lies in the last of these many steps."""
        passes = self.position_after(step)[0]
        return passes if step and passes > self.position_after(step - 1)[0] else None

    def num_tokens(self, step: int) -> int:
        """Tokens of a step, counted from 0."""
        return int(self._lengths[self.step(step)].sum())

    def from_step(self, step: int) -> Rest:
        """What is still to be seen after `step` steps."""
        return Rest(self, step)

    def _at(self, index: int) -> int:
        epoch, position = divmod(index, len(self._lengths))
        if epoch not in self._orders:
            order = epoch_order(len(self._lengths), self._seed, epoch)
            self._orders = {known: kept for known, kept in self._orders.items() if known == epoch - 1} | {epoch: order}
        return int(self._orders[epoch][position])


class Rest:
    """A sampler, as torch's data loader wants one: the examples of all steps that remain, one after the other."""

    def __init__(self, plan: Plan, step: int) -> None:
        self._plan, self._step = plan, step

    def __len__(self) -> int:
        return (self._plan.num_steps - self._step) * self._plan.micro_batches.per_step

    def __iter__(self) -> Iterator[int]:
        for step in range(self._step, self._plan.num_steps):
            yield from self._plan.step(step)


def _micro_batches(lengths: numpy.ndarray, longest: int, recipe: Recipe, divisor: int) -> MicroBatches:
    """Powers of two, so that a forward pass halved after running out of memory still gives steps of the same size."""
    most = recipe.micro_batch_tokens or UNPLANNED_PACK_TOKENS
    size = _power_of_two_up_to(min(len(lengths), most // longest))
    wanted = round(recipe.batch_tokens / float(lengths.mean()) / size)
    num = max(1, min(wanted, len(lengths) // size))
    smaller = max(1, size // divisor)
    return MicroBatches(smaller, num * (size // smaller))


def _power_of_two_up_to(limit: int) -> int:
    return 1 << max(0, limit.bit_length() - 1)
