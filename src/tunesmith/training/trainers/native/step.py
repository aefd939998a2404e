"""One optimizer step: micro-batches, a loss normalised over the whole step, clipping, update, and raw metrics."""

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
from tunesmith.training.trainers.native.distributed import TrainingGroup
from tunesmith.training.trainers.native.objectives import LossDenominators, Objective, loss_denominators
from tunesmith.training.trainers.native.optimizer import learning_rate

_MAX_SHOWN = 8


@dataclass(frozen=True)
class StepResult:
    """The result of a step. If it is nonfinite, the weights are unchanged."""

    loss: float
    num_items: int
    num_tokens: int
    num_trained_tokens: int
    metrics: dict[str, float]
    nonfinite_reason: str | None
    nonfinite_examples: tuple[str, ...]
    """Ids of the examples in which NaN or infinity appeared."""

    def raise_if_nonfinite(self, step: int) -> None:
        if self.nonfinite_reason is not None:
            raise nonfinite_step(self.nonfinite_reason, step, self.nonfinite_examples)


def nonfinite_step(why: str, step: int, nonfinite_examples: Sequence[str]) -> ProgramFailure:
    """Return the failure that ends a training with a nonfinite loss or gradient; names the step and the examples."""
    more = len(nonfinite_examples) - _MAX_SHOWN
    named = ", ".join(nonfinite_examples[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return ProgramFailure(
        ErrorClass.NONFINITE,
        f"{why} at step {step}; examples: {named}; the last good checkpoint remains; "
        "lower recipe.lr or check these examples and the base's weights",
    )


class TrainStep:
    """Runs optimizer steps on one adapter, in one process or as one rank of a group.

    On CUDA the host synchronizes once, at the end of a step: passes, clipping and update are queued before. The update
    itself skips a step with a nonfinite loss or gradient.
    """

    def __init__(
        self,
        backend: ComputeBackend,
        optimizer: Any,
        recipe: Recipe,
        packer: Packer,
        objective: Objective,
        group: TrainingGroup,
    ) -> None:
        self._backend, self._optimizer, self._recipe = backend, optimizer, recipe
        self._packer, self._objective, self._group = packer, objective, group
        self._parameters = [tensor for _, tensor in trained_parameters(backend.model)]
        self._prefetched: tuple[list[str], list[tuple[list[Item], MicroBatch]]] | None = None

    def run(self, step: int, num_steps: int, items: Sequence[Item], upcoming: Sequence[Item] = ()) -> StepResult:
        """Run the step after `step` others, together with the group; it does not depend on how items are grouped.

        Prepares the `upcoming` items on the host while the device works.
        """
        clock = _Stopwatch(self._parameters[0].is_cuda)
        rate = learning_rate(self._recipe, step, num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        denominators = loss_denominators(items)
        passes, totals = self._gradients(items, denominators, clock)
        with clock("optimizer"):
            self._group.sum_gradients(self._parameters)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.max_grad_norm)
            update = self._update(is_nonfinite=~torch.isfinite(norm) | ~torch.isfinite(torch.as_tensor(totals["loss"])))
        self._prefetch(upcoming)
        figures = _read(totals | {"grad_norm": norm, "update_ratio": update})
        loss, num_tokens = figures.pop("loss"), sum(len(item) for item in items)
        reason, nonfinite_examples = self._find_nonfinite(loss, figures["grad_norm"], passes, items)
        metrics = {
            "loss": loss,
            "lr": rate,
            "tokens_per_s": num_tokens / max(clock.total_s(), 1e-9),
            "memory_mb": memory_mb(),
            **figures,
            **clock.seconds(),
        }
        return StepResult(loss, len(items), num_tokens, denominators.num_trained, metrics, reason, nonfinite_examples)

    def _gradients(
        self, items: Sequence[Item], denominators: LossDenominators, clock: _Stopwatch
    ) -> tuple[list[tuple[list[Item], Any]], dict[str, Any]]:
        """Compute the gradients of this process's shard; return its passes, and the metrics of the whole step."""
        self._backend.start_step()
        with clock("data"):
            shard = self._shard_of(items)
        with clock("forward"):
            own = [item for some, _ in shard for item in some]
            kl_estimate = self._group.all_reduce_sum(self._objective.kl_estimate(own, self._score))
        if not self._backend.model.training:  # setting it walks over every module, which takes longer than a small pass
            self._backend.model.train()
        totals: dict[str, Any] = {"loss": 0.0}
        passes = []
        for some, batch in shard:
            with clock("forward"):
                spans = self._backend.span_log_probs(batch)
                terms = self._objective.terms(some, spans, denominators, kl_estimate)
            with clock("backward"):
                terms.loss.backward()
            passes.append((some, spans.detach()))
            for name, figure in [("loss", terms.loss.detach()), *terms.figures.items()]:
                totals[name] = totals.get(name, 0.0) + _wide(figure)
        return passes, self._group.all_reduce_sums(totals)

    def _shard_of(self, items: Sequence[Item]) -> list[tuple[list[Item], MicroBatch]]:
        """Return this process's passes of a step: the items and micro-batch of each."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == [item.id for item in items]:
            return prefetched[1]
        groups = [[items[index] for index in group] for group in self._packer.groups(items)]
        return [(some, self._packer.micro_batch(some)) for some in self._group.shard(groups)]

    def _prefetch(self, items: Sequence[Item]) -> None:
        """Prepare the next step while the device still works on this one."""
        if not self._parameters[0].is_cuda:
            return  # the CPU computes the step itself, so nothing could overlap
        passes = self._shard_of(items)
        for _, batch in passes:
            self._backend.prefetch(batch)
        self._prefetched = ([item.id for item in items], passes)

    def _find_nonfinite(
        self, loss: float, norm: float, passes: Sequence[tuple[Sequence[Item], Any]], items: Sequence[Item]
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return why the step is nonfinite and in which examples; None and no examples if it is finite."""
        if math.isfinite(loss) and math.isfinite(norm):
            return None, ()
        if math.isfinite(loss):
            return f"the gradient norm is {norm}", tuple(item.id for item in items)
        own = [name for some, spans in passes for name in _nonfinite_items(some, spans)]
        every = self._group.concatenate(tuple(own))
        return f"the loss is {loss}", every or tuple(item.id for item in items)

    def _score(self, items: Sequence[Item]) -> dict[str, list[float]]:
        found = answer_log_probs(self._backend, items, self._packer)
        assert found is not None
        return found

    def _update(self, is_nonfinite: Any) -> Any:
        """Apply the gradients unless they are nonfinite; return the size of the change relative to the weights."""
        with torch.no_grad():
            before = torch._foreach_mul([tensor.detach() for tensor in self._parameters], 1.0)  # copies, in one go
            # the fused optimizer reads it on the device and does nothing if it is 1
            self._optimizer.found_inf = is_nonfinite.to(self._parameters[0].device, torch.float32)
            self._optimizer.step()
            moved = torch._foreach_sub([tensor.detach() for tensor in self._parameters], before)
            return _norm(moved) / _norm(before).clamp(min=1e-12)


class _Stopwatch:
    """Measures the parts of a step; on CUDA with events, because work is only queued when a block is left."""

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


def _nonfinite_items(items: Sequence[Item], spans: Any) -> list[str]:
    values, bad = spans.tolist(), []
    for item in items:
        own, values = values[: 1 + len(item.completions)], values[1 + len(item.completions) :]
        if not all(map(math.isfinite, own)):
            bad.append(item.id)
    return bad


def _norm(tensors: Sequence[Any]) -> Any:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))


def _wide(figure: Any) -> Any:
    """Sums over passes are made in float64."""
    return figure.double() if isinstance(figure, torch.Tensor) else figure


def _read(figures: dict[str, Any]) -> dict[str, float]:
    """Read all metrics at once: on CUDA the only synchronization of a step."""
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
