"""One optimizer step: passes over packs, a loss weighed over the whole step, clipping, update, and the raw numbers."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunesmith.clock import boot_seconds
from tunesmith.domain.profile import Recipe
from tunesmith.domain.task import ErrorClass
from tunesmith.modeling.adapters import trained_parameters
from tunesmith.modeling.packs import Item, Packer
from tunesmith.modeling.scoring import answer_log_probs, span_log_probs
from tunesmith.programs.host import ProgramFailure
from tunesmith.trainers.native.objectives import Objective, Weights, weigh
from tunesmith.trainers.native.optimizer import learning_rate
from tunesmith.trainers.native.team import Team

_NAMED_EXAMPLES = 8


@dataclass(frozen=True)
class MadeStep:
    """What a step was like; broken ones left the weights as they were."""

    loss: float
    num_tokens: int
    num_trained_tokens: int
    metrics: dict[str, float]
    broken: str | None
    suspects: tuple[str, ...]
    """Ids of the examples in which NaN or infinity appeared."""

    def raise_if_broken(self, step: int) -> None:
        if self.broken is not None:
            raise broken_step(self.broken, step, self.suspects)


def broken_step(why: str, step: int, suspects: Sequence[str]) -> ProgramFailure:
    """The end of a training whose numbers broke: where, and in which examples."""
    more = len(suspects) - _NAMED_EXAMPLES
    named = ", ".join(suspects[:_NAMED_EXAMPLES]) + (f" and {more} more" if more > 0 else "")
    return ProgramFailure(
        ErrorClass.NONFINITE,
        f"{why} at step {step}; examples: {named}; the last good checkpoint remains; "
        "lower recipe.lr or look at these examples and at the base's weights",
    )


class StepMaker:
    """Makes steps on one adapter with one optimizer, alone or as one of a team."""

    def __init__(
        self, adapted: Any, optimizer: Any, recipe: Recipe, packer: Packer, objective: Objective, team: Team
    ) -> None:
        self._adapted, self._optimizer, self._recipe = adapted, optimizer, recipe
        self._packer, self._objective, self._team = packer, objective, team
        self._parameters = [tensor for _, tensor in trained_parameters(adapted)]

    def make(self, step: int, num_steps: int, items: Sequence[Item]) -> MadeStep:
        """The step after `step` others, together with the team; the same loss and gradients however it is cut."""
        clock = _Stopwatch(self._parameters[0].is_cuda)
        rate = learning_rate(self._recipe, step, num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        weights = weigh(items)
        loss, figures, suspects = self._gradients(items, weights, clock)
        norm = update = float("nan")
        broken = None if math.isfinite(loss) else f"the loss is {loss}"
        with clock("optimizer"):
            if broken is None:
                self._team.sum_gradients(self._parameters)
                norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip))
                if math.isfinite(norm):
                    update = self._update()
                else:
                    broken, suspects = f"the gradient norm is {norm}", tuple(item.id for item in items)
        num_tokens = sum(len(item) for item in items)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "tokens_per_s": num_tokens / max(clock.total_s(), 1e-9),
            "memory_mb": memory_mb(),
            "update_ratio": update,
        }
        return MadeStep(loss, num_tokens, weights.num_trained, metrics | figures | clock.seconds(), broken, suspects)

    def _gradients(
        self, items: Sequence[Item], weights: Weights, clock: _Stopwatch
    ) -> tuple[float, dict[str, float], tuple[str, ...]]:
        """Gradients of this process's share of the step; loss and figures of the whole step."""
        self._optimizer.zero_grad(set_to_none=True)
        passes = [[items[index] for index in group] for group in self._packer.groups(items)]
        mine = self._team.share(passes)
        with clock("forward"):
            own = [item for some in mine for item in some]
            aside = self._team.total(self._objective.aside(own, self._score))
        self._adapted.train()
        totals: defaultdict[str, float] = defaultdict(float)
        suspects: tuple[str, ...] = ()
        for some in mine:
            with clock("data"):
                layout = self._packer.layout(some)
            with clock("forward"):
                spans = span_log_probs(self._adapted, layout)
                terms = self._objective.terms(some, spans, weights, aside)
            with clock("backward"):
                value = float(terms.loss.detach())
                totals["loss"] += value
                if not math.isfinite(value):
                    suspects = _broken_ones(some, spans)
                    break  # the others of the team hear of it in the total
                terms.loss.backward()
            for name, figure in terms.figures.items():
                totals[name] += figure
        summed = self._team.totals(dict(totals))
        loss = summed.pop("loss")
        return loss, summed, self._team.joined(suspects)

    def _score(self, items: Sequence[Item]) -> dict[str, list[float]]:
        found = answer_log_probs(self._adapted, items, self._packer)
        assert found is not None
        return found

    def _update(self) -> float:
        """Apply the gradients; how large the change is relative to the weights."""
        before = [tensor.detach().clone() for tensor in self._parameters]
        self._optimizer.step()
        with torch.no_grad():
            moved = [after - old for after, old in zip(self._parameters, before, strict=True)]
            return _norm(moved) / max(_norm(before), 1e-12)


class _Stopwatch:
    """Where the time of a step goes. On CUDA, work is only queued when a line is left: its own clock is asked."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._began_at = boot_seconds()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._marks: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        if self._is_cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._marks.append((what, first, last))
        else:
            began_at = boot_seconds()
            yield
            self._spent[what] += boot_seconds() - began_at

    def total_s(self) -> float:
        return boot_seconds() - self._began_at

    def seconds(self) -> dict[str, float]:
        if self._marks:
            torch.cuda.synchronize()
        for what, first, last in self._marks:
            self._spent[what] += first.elapsed_time(last) / 1000
        return {f"{what}_s": seconds for what, seconds in self._spent.items()}


def _broken_ones(items: Sequence[Item], spans: Any) -> tuple[str, ...]:
    values, bad = spans.detach().tolist(), []
    for item in items:
        own, values = values[: 1 + len(item.branches)], values[1 + len(item.branches) :]
        if not all(map(math.isfinite, own)):
            bad.append(item.id)
    return tuple(bad or [item.id for item in items])


def _norm(tensors: Sequence[Any]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])))


def memory_mb() -> float:
    """The most the device's allocator held, or what this process holds now on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # no /proc: the largest so far
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
