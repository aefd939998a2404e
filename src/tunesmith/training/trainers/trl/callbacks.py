"""What TRL's loop calls while it runs: collects raw metrics, and asks the training controller what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tunesmith.core.clock import boot_seconds
from tunesmith.models.adapters import trained_parameters
from tunesmith.models.packs import Item
from tunesmith.programs.host import Program
from tunesmith.training.trainers.native.controller import StepMetrics, StopReason, Training, TrainingController
from tunesmith.training.trainers.native.random_state import seed_everything
from tunesmith.training.trainers.native.state import SavedState, restore
from tunesmith.training.trainers.native.step import memory_mb, nonfinite_step
from tunesmith.training.trainers.trl.plan import Plan


class TrlAttempt:
    """One attempt at a training by TRL; the callbacks of a `TrlTrainer`."""

    def __init__(
        self, program: Program, training: Training, plan: Plan, items: Sequence[Item], saved: SavedState | None
    ) -> None:
        self.controller = TrainingController(program, training, saved)
        self._training, self._plan, self._items = training, plan, items
        self._spec, self._saved = program.train_spec, saved
        self._losses: list[float] = []
        self._norm = self._lr = math.nan
        self._step_at = boot_seconds()
        self._is_first = True
        self.stop_reason: StopReason | None = None

    def on_train_begin(self) -> bool:
        """Call before the first step; returns whether there is one to make."""
        self._restore()
        self.controller.on_train_begin()
        return self._should_continue()

    def on_step_begin(self) -> None:
        if self._is_first:
            self._restore()  # once more: what TRL sets up before its first step draws numbers and moves tensors
            self._is_first = False
        self._losses, self._norm = [], math.nan
        self._lr = float(self._training.optimizer.param_groups[0]["lr"])
        self._step_at = boot_seconds()

    def on_micro_batch_end(self, loss: float) -> None:
        self._losses.append(loss)
        if not math.isfinite(loss):
            size = self._plan.micro_batches.size
            first = (len(self._losses) - 1) * size
            self._fail(f"the loss is {loss}", self._step_items()[first : first + size])

    def on_pre_optimizer_step(self) -> None:
        parameters = [tensor for _, tensor in trained_parameters(self._training.adapted)]
        self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._spec.run.recipe.max_grad_norm))
        if not math.isfinite(self._norm):
            self._fail(f"the gradient norm is {self._norm}", self._step_items())

    def on_step_end(self) -> bool:
        items, tokens = self._step_items(), self._plan.num_tokens(self.controller.state.step)
        num_trained = sum(item.num_trained for item in items)
        metrics = self._metrics(tokens)
        self.controller.on_step_end(StepMetrics(metrics["loss"], self._lr, tokens, num_trained, len(items), metrics))
        return self._should_continue()

    def _restore(self) -> None:
        """Set weights, optimizer and random numbers to the beginning, or to the checkpoint."""
        if self._saved is not None and self._spec.resume is not None:
            restore(Path(self._spec.resume.path), self._saved, self._training.adapted, self._training.optimizer)
        else:
            seed_everything(self._spec.run.recipe.seed)

    def _should_continue(self) -> bool:
        self.stop_reason = self.controller.stop_reason()
        return self.stop_reason is None

    def _step_items(self) -> list[Item]:
        return [self._items[index] for index in self._plan.step(self.controller.state.step)]

    def _metrics(self, tokens: int) -> dict[str, float]:
        return {
            "loss": math.fsum(self._losses),
            "grad_norm": self._norm,
            "lr": self._lr,
            "tokens_per_s": tokens / max(boot_seconds() - self._step_at, 1e-9),
            "memory_mb": memory_mb(),
        }

    def _fail(self, why: str, items: Sequence[Item]) -> None:
        """Log the raw metrics, then fail; the weights are those before the step."""
        step = self.controller.state.step + 1
        self.controller.log(step, self._metrics(0))
        raise nonfinite_step(why, step, [item.id for item in items])
