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

from tunesmith.core.clock import boot_seconds
from tunesmith.models.adapters import trained_parameters
from tunesmith.models.packs import Item, MicroBatch, Packer
from tunesmith.models.scoring import ComputeBackend, answer_log_probs
from tunesmith.profiles.profile import Recipe
from tunesmith.programs.host import ProgramFailure
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.native.distributed import Team
from tunesmith.training.trainers.native.objectives import Objective, Weights, weigh
from tunesmith.training.trainers.native.optimizer import learning_rate

_NAMED_EXAMPLES = 8


@dataclass(frozen=True)
class MadeStep:
    """What a step was like; broken ones left the weights as they were."""

    loss: float
    num_items: int
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
    """Makes steps on one adapter with one optimizer, alone or as one of a team.

    On CUDA a step is queued whole and waited for once, at its end: passes, clipping and update follow each other there
    without the host, and a step whose numbers broke is left out by the update itself.
    """

    def __init__(
        self, backend: ComputeBackend, optimizer: Any, recipe: Recipe, packer: Packer, objective: Objective, team: Team
    ) -> None:
        self._backend, self._optimizer, self._recipe = backend, optimizer, recipe
        self._packer, self._objective, self._team = packer, objective, team
        self._parameters = [tensor for _, tensor in trained_parameters(backend.model)]
        self._prefetched: tuple[list[str], list[tuple[list[Item], MicroBatch]]] | None = None

    def make(self, step: int, num_steps: int, items: Sequence[Item], upcoming: Sequence[Item] = ()) -> MadeStep:
        """The step after `step` others, together with the team; the same loss and gradients however it is cut.

        What can be prepared of the `upcoming` items is, while the device works.
        """
        clock = _Stopwatch(self._parameters[0].is_cuda)
        rate = learning_rate(self._recipe, step, num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        weights = weigh(items)
        passes, totals = self._gradients(items, weights, clock)
        with clock("optimizer"):
            self._team.sum_gradients(self._parameters)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip)
            update = self._update(is_broken=~torch.isfinite(norm) | ~torch.isfinite(torch.as_tensor(totals["loss"])))
        self._prefetch(upcoming)
        figures = _read(totals | {"grad_norm": norm, "update_ratio": update})
        loss, num_tokens = figures.pop("loss"), sum(len(item) for item in items)
        broken, suspects = self._look(loss, figures["grad_norm"], passes, items)
        metrics = {
            "loss": loss,
            "lr": rate,
            "tokens_per_s": num_tokens / max(clock.total_s(), 1e-9),
            "memory_mb": memory_mb(),
            **figures,
            **clock.seconds(),
        }
        return MadeStep(loss, len(items), num_tokens, weights.num_trained, metrics, broken, suspects)

    def _gradients(
        self, items: Sequence[Item], weights: Weights, clock: _Stopwatch
    ) -> tuple[list[tuple[list[Item], Any]], dict[str, Any]]:
        """Gradients of this process's share of the step, pass by pass; loss and figures of the whole step."""
        self._backend.start_step()
        with clock("data"):
            mine = self._share_of(items)
        with clock("forward"):
            own = [item for some, _ in mine for item in some]
            aside = self._team.total(self._objective.aside(own, self._score))
        if not self._backend.model.training:  # setting it walks over every module, which takes longer than a small pass
            self._backend.model.train()
        totals: dict[str, Any] = {"loss": 0.0}
        passes = []
        for some, batch in mine:
            with clock("forward"):
                spans = self._backend.span_log_probs(batch)
                terms = self._objective.terms(some, spans, weights, aside)
            with clock("backward"):
                terms.loss.backward()
            passes.append((some, spans.detach()))
            for name, figure in [("loss", terms.loss.detach()), *terms.figures.items()]:
                totals[name] = totals.get(name, 0.0) + _wide(figure)
        return passes, self._team.totals(totals)

    def _share_of(self, items: Sequence[Item]) -> list[tuple[list[Item], MicroBatch]]:
        """This process's passes of a step: which items, and how they are laid out."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == [item.id for item in items]:
            return prefetched[1]
        groups = [[items[index] for index in group] for group in self._packer.groups(items)]
        return [(some, self._packer.micro_batch(some)) for some in self._team.share(groups)]

    def _prefetch(self, items: Sequence[Item]) -> None:
        """Prepare the next step while the device still works on this one."""
        if not self._parameters[0].is_cuda:
            return  # there is nobody else to work meanwhile
        passes = self._share_of(items)
        for _, batch in passes:
            self._backend.prefetch(batch)
        self._prefetched = ([item.id for item in items], passes)

    def _look(
        self, loss: float, norm: float, passes: Sequence[tuple[Sequence[Item], Any]], items: Sequence[Item]
    ) -> tuple[str | None, tuple[str, ...]]:
        """What broke, and in which examples."""
        if math.isfinite(loss) and math.isfinite(norm):
            return None, ()
        if math.isfinite(loss):
            return f"the gradient norm is {norm}", tuple(item.id for item in items)
        found = [name for some, spans in passes for name in _broken_ones(some, spans)]
        joined = self._team.joined(tuple(found))
        return f"the loss is {loss}", joined or tuple(item.id for item in items)

    def _score(self, items: Sequence[Item]) -> dict[str, list[float]]:
        found = answer_log_probs(self._backend, items, self._packer)
        assert found is not None
        return found

    def _update(self, is_broken: Any) -> Any:
        """Apply the gradients, unless something broke; how large the change is relative to the weights."""
        with torch.no_grad():
            before = torch._foreach_mul([tensor.detach() for tensor in self._parameters], 1.0)  # copies, in one go
            # the fused optimizer reads it on the device and does nothing if it is 1
            self._optimizer.found_inf = is_broken.to(self._parameters[0].device, torch.float32)
            self._optimizer.step()
            moved = torch._foreach_sub([tensor.detach() for tensor in self._parameters], before)
            return _norm(moved) / _norm(before).clamp(min=1e-12)


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


def _broken_ones(items: Sequence[Item], spans: Any) -> list[str]:
    values, bad = spans.tolist(), []
    for item in items:
        own, values = values[: 1 + len(item.completions)], values[1 + len(item.completions) :]
        if not all(map(math.isfinite, own)):
            bad.append(item.id)
    return bad


def _norm(tensors: Sequence[Any]) -> Any:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))


def _wide(figure: Any) -> Any:
    """Sums over passes are made with more digits than the passes have."""
    return figure.double() if isinstance(figure, torch.Tensor) else figure


def _read(figures: dict[str, Any]) -> dict[str, float]:
    """All numbers at once: on CUDA this is where a step is waited for."""
    device = next((figure.device for figure in figures.values() if isinstance(figure, torch.Tensor)), None)
    joined = torch.stack([torch.as_tensor(figure, dtype=torch.float64, device=device) for figure in figures.values()])
    return dict(zip(figures, joined.tolist(), strict=True))


def memory_mb() -> float:
    """The most the device's allocator held, or what this process holds now on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # no /proc: the largest so far
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
