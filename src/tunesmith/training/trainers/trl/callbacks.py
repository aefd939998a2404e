"""What TRL's loop calls while it runs: raw numbers are gathered and judged, and the course decides what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tunesmith.core.clock import boot_seconds
from tunesmith.models.adapters import trained_parameters
from tunesmith.models.packs import Item
from tunesmith.programs.host import Program
from tunesmith.training.trainers.native.controller import Course, Ending, StepTold, Training
from tunesmith.training.trainers.native.random_state import seed_everything
from tunesmith.training.trainers.native.state import SavedState, restore
from tunesmith.training.trainers.native.step import broken_step, memory_mb
from tunesmith.training.trainers.trl.plan import Plan


class Session:
    """One attempt at a training; an engine's watcher."""

    def __init__(
        self, program: Program, training: Training, plan: Plan, items: Sequence[Item], saved: SavedState | None
    ) -> None:
        self.course = Course(program, training, saved)
        self._training, self._plan, self._items = training, plan, items
        self._spec, self._saved = program.train_spec, saved
        self._losses: list[float] = []
        self._norm = self._lr = math.nan
        self._step_at = boot_seconds()
        self._is_first = True
        self.ending: Ending | None = None

    def begin(self) -> bool:
        """Before the first step; whether there is one to make."""
        self._put_back()
        self.course.begin()
        return self._goes_on()

    def step_begins(self) -> None:
        if self._is_first:
            self._put_back()  # once more: what TRL sets up before its first step draws numbers and moves tensors
            self._is_first = False
        self._losses, self._norm = [], math.nan
        self._lr = float(self._training.optimizer.param_groups[0]["lr"])
        self._step_at = boot_seconds()

    def portion_done(self, loss: float) -> None:
        self._losses.append(loss)
        if not math.isfinite(loss):
            size = self._plan.portions.size
            first = (len(self._losses) - 1) * size
            self._break(f"the loss is {loss}", self._step_items()[first : first + size])

    def before_update(self) -> None:
        parameters = [tensor for _, tensor in trained_parameters(self._training.adapted)]
        self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._spec.run.recipe.clip))
        if not math.isfinite(self._norm):
            self._break(f"the gradient norm is {self._norm}", self._step_items())

    def step_done(self) -> bool:
        items, tokens = self._step_items(), self._plan.num_tokens(self.course.standing.step)
        num_trained = sum(item.num_trained for item in items)
        metrics = self._metrics(tokens)
        self.course.step_made(StepTold(metrics["loss"], self._lr, tokens, num_trained, len(items), metrics))
        return self._goes_on()

    def _put_back(self) -> None:
        """Weights, optimizer and random numbers as they are at the beginning, or as the checkpoint has them."""
        if self._saved is not None and self._spec.resume is not None:
            restore(Path(self._spec.resume.path), self._saved, self._training.adapted, self._training.optimizer)
        else:
            seed_everything(self._spec.run.recipe.seed)

    def _goes_on(self) -> bool:
        self.ending = self.course.ending()
        return self.ending is None

    def _step_items(self) -> list[Item]:
        return [self._items[index] for index in self._plan.step(self.course.standing.step)]

    def _metrics(self, tokens: int) -> dict[str, float]:
        return {
            "loss": math.fsum(self._losses),
            "grad_norm": self._norm,
            "lr": self._lr,
            "tokens_per_s": tokens / max(boot_seconds() - self._step_at, 1e-9),
            "memory_mb": memory_mb(),
        }

    def _break(self, why: str, items: Sequence[Item]) -> None:
        """Tell the raw numbers, then end; the weights are as they were before the step."""
        step = self.course.standing.step + 1
        self.course.tell(step, self._metrics(0))
        raise broken_step(why, step, [item.id for item in items])
