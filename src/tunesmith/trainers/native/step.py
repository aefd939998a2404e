"""One optimizer step: micro-batches, token-weighted loss, clipping, update, and the raw numbers about it."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunesmith.clock import boot_seconds
from tunesmith.domain.profile import Recipe
from tunesmith.domain.task import ErrorClass
from tunesmith.modeling.adapters import trained_parameters
from tunesmith.modeling.chat import Tokenized
from tunesmith.modeling.scoring import batches_by_tokens, nll_sums
from tunesmith.programs.host import ProgramFailure
from tunesmith.trainers.native.optimizer import learning_rate

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
        if self.broken is None:
            return
        named = ", ".join(self.suspects[:_NAMED_EXAMPLES])
        more = len(self.suspects) - _NAMED_EXAMPLES
        raise ProgramFailure(
            ErrorClass.NONFINITE,
            f"{self.broken} at step {step}; examples: {named}{f' and {more} more' if more > 0 else ''}; "
            "the last good checkpoint remains; lower recipe.lr or look at these examples and at the base's weights",
        )


class StepMaker:
    """Makes steps on one adapter with one optimizer."""

    def __init__(self, adapted: Any, optimizer: Any, recipe: Recipe, micro_batch_tokens: int, pad_id: int) -> None:
        self._adapted, self._optimizer, self._recipe = adapted, optimizer, recipe
        self._micro_batch_tokens, self._pad_id = micro_batch_tokens, pad_id
        self._parameters = [tensor for _, tensor in trained_parameters(adapted)]

    def make(self, step: int, num_steps: int, examples: Sequence[Tokenized]) -> MadeStep:
        """The step after `step` others; the loss is the mean over all trained tokens, however they are batched."""
        began_at = boot_seconds()
        rate = learning_rate(self._recipe, step, num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        num_trained = sum(example.num_trained for example in examples)
        loss, suspects = self._backward(examples, num_trained)
        norm = update = float("nan")
        broken = None if math.isfinite(loss) else f"the loss is {loss}"
        if broken is None:
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip))
            if math.isfinite(norm):
                update = self._update()
            else:
                broken, suspects = f"the gradient norm is {norm}", tuple(example.id for example in examples)
        num_tokens = sum(len(example) for example in examples)
        seconds = max(boot_seconds() - began_at, 1e-9)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "tokens_per_s": num_tokens / seconds,
            "memory_mb": _memory_mb(),
            "update_ratio": update,
        }
        return MadeStep(loss, num_tokens, num_trained, metrics, broken, suspects)

    def _backward(self, examples: Sequence[Tokenized], num_trained: int) -> tuple[float, tuple[str, ...]]:
        """Gradients of the whole step, one micro-batch after the other; stops at the first that is not finite."""
        self._adapted.train()
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for group in batches_by_tokens([len(example) for example in examples], self._micro_batch_tokens):
            rows = [examples[index] for index in group]
            sums = nll_sums(self._adapted, rows, self._pad_id)
            values = sums.detach().double().tolist()
            total += math.fsum(values)
            if not math.isfinite(total):
                bad = [row.id for row, value in zip(rows, values, strict=True) if not math.isfinite(value)]
                return total / num_trained, tuple(bad)
            (sums.sum() / num_trained).backward()
        return total / num_trained, ()

    def _update(self) -> float:
        """Apply the gradients; how large the change is relative to the weights."""
        before = [tensor.detach().clone() for tensor in self._parameters]
        self._optimizer.step()
        with torch.no_grad():
            moved = [after - old for after, old in zip(self._parameters, before, strict=True)]
            return _norm(moved) / max(_norm(before), 1e-12)


def _norm(tensors: Sequence[Any]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])))


def _memory_mb() -> float:
    """The most the device's allocator held, or what this process holds now on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # no /proc: the largest so far
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
