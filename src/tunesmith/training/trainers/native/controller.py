"""The training controller: callbacks around the steps for metrics, validation, checkpoints, requests and budgets.

The native loop and TRL's loop make the steps; both call the controller before, between and after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from tunesmith.core.clock import boot_seconds
from tunesmith.core.errors import DataError
from tunesmith.models.adapters import adapter_norms
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import ControlRequest, Program, ProgramFailure
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.rules.save_schedule import SaveContext, is_due
from tunesmith.training.trainers.native.checkpoints import CheckpointManager
from tunesmith.training.trainers.native.distributed import Command, TrainingGroup
from tunesmith.training.trainers.native.state import ADAPTER, BEST, SavedState, TrainerState, state_of
from tunesmith.training.trainers.native.validation import LOSS, Validator, is_better


class StopReason(StrEnum):
    """Why a training stops."""

    FINISHED = "finished"
    WALL = "wall"  # the time budget is used up
    TOKENS = "tokens"  # the token budget is used up
    STOP = "stop"
    PAUSE = "pause"
    CANCEL = "cancel"
    TERMINATED = "terminated"


INTERRUPTIONS = frozenset({StopReason.PAUSE, StopReason.CANCEL, StopReason.TERMINATED})


class BatchSchedule(Protocol):
    """Which examples each step uses, as far as the controller must know."""

    num_steps: int

    def position_after(self, step: int) -> tuple[int, int]:
        """Return the epoch and the position in it after `step` steps."""

    def epoch_ended_by(self, step: int) -> int | None:
        """Return the epoch, counted from 1, that ends with step number `step`; None inside an epoch."""

    def num_tokens(self, step: int) -> int:
        """Return the number of tokens of the step after `step` others."""


@dataclass(frozen=True)
class Training:
    """What is trained, with which batches, and how it is validated."""

    adapted: Any
    optimizer: Any
    schedule: BatchSchedule
    validator: Validator | None
    """None without a validation split: then the last step is the best."""
    group: TrainingGroup


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one optimizer step, from the loop that made it."""

    loss: float
    lr: float
    num_tokens: int
    num_trained_tokens: int
    num_examples: int
    metrics: dict[str, float]


class TrainingController:
    """Controls one attempt at a training, from its beginning or from a checkpoint."""

    def __init__(self, program: Program, training: Training, saved: SavedState | None) -> None:
        self._program, self._training = program, training
        self._spec = program.train_spec
        self.state = saved.standing if saved else TrainerState()
        self.checkpoints = CheckpointManager(program, self._best_of(saved) if saved else None)
        self.first_loss: float | None = None
        """The validation loss before training, if this attempt saw the beginning."""
        self._started_at = self._saved_at = boot_seconds()
        self._spent_before = self.state.train_s
        self._saved_step = self.state.step if saved else -1
        self._best_is_saved = True
        self._held_s = 0.0
        """Seconds that saving blocked the training since the last step was logged."""
        self._expected_loss = self.state.last_loss
        """Loss of the last step before a resume; the first step after it is compared with it."""
        self._reserve_s = 0.0
        """Duration of the last validation: reserved from the time budget."""
        self._requests: list[ControlRequest] = []

    def _best_of(self, saved: SavedState) -> Path | None:
        """Return the best adapter of the checkpoint to resume from. Raises DataError if it does not fit this data."""
        assert self._spec.resume is not None
        folder, state, schedule = Path(self._spec.resume.path), saved.standing, self._training.schedule
        if state.step > schedule.num_steps or schedule.position_after(state.step) != (saved.epoch, saved.position):
            raise DataError(f"checkpoint {folder.name} is at a position that this data does not have; start a new run")
        self._program.log(f"resumed at step {state.step} of {schedule.num_steps}")
        if state.best_step is None:
            return None
        return folder / (ADAPTER if state.best_step == state.step else BEST)

    @property
    def train_s(self) -> float:
        """Seconds of this attempt."""
        return boot_seconds() - self._started_at

    def on_train_begin(self) -> None:
        """Call before the first step. Repeats a validation that SIGTERM interrupted."""
        self._program.phase(Phase.TRAIN)
        self._validate_if_due()
        self._save_if_due()

    def on_step_end(self, step_metrics: StepMetrics) -> None:
        """Call after a successful step: logs it, validates and saves where that is due."""
        state = self.state
        self.state = state.model_copy(
            update={
                "step": state.step + 1,
                "num_tokens": state.num_tokens + step_metrics.num_tokens,
                "num_trained_tokens": state.num_trained_tokens + step_metrics.num_trained_tokens,
                "num_seen": state.num_seen + step_metrics.num_examples,
                "last_loss": step_metrics.loss,
                "last_lr": step_metrics.lr,
            }
        )
        self.log(self.state.step, step_metrics.metrics)
        self._program.progress(self.state.step, self._training.schedule.num_steps)
        self._compare(step_metrics.loss)
        self._validate_if_due()
        self._save_if_due()
        self.checkpoints.raise_write_error()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Report the raw metrics of a step, also of one with a nonfinite loss."""
        held_s, self._held_s = self._held_s, 0.0
        saving = {"save_s": held_s, "write_s": self.checkpoints.take_write_s()}
        self._program.metrics(step, metrics | {"tokens": float(self.state.num_tokens)} | saving)

    def stop_reason(self) -> StopReason | None:
        """Return why to stop now; None to continue."""
        if self._program.terminating:
            return StopReason.TERMINATED
        self._poll_requests()
        decision = strongest([request.kind for request in self._requests])
        if decision is RequestKind.STOP and self.state.step == 0:
            decision = None  # there is no best step yet: make one first
        if decision is not None:
            return StopReason(decision.value)
        if self.state.step >= self._training.schedule.num_steps:
            return StopReason.FINISHED
        return self._budget()

    def on_train_end(self, stop_reason: StopReason) -> None:
        """Call after the last step: saves unless the training was cancelled, and acknowledges every request."""
        if stop_reason not in INTERRUPTIONS:
            self._conclude(stop_reason)
        elif stop_reason is not StopReason.CANCEL and self.state.step > max(0, self._saved_step):
            self._save([])  # nothing to save if nothing was trained since the last save
        self._wait_for_writer()
        for request in self._requests:  # one that a stronger request overtook is told so
            fulfilled = request.kind.value == stop_reason.value
            self._program.ack(
                request.id, f"at step {self.state.step}" if fulfilled else f"overtaken: {stop_reason.value}"
            )

    def _compare(self, loss: float) -> None:
        expected, self._expected_loss = self._expected_loss, None
        if expected is not None and loss > 2 * expected + 1:
            self._program.log(
                f"the loss jumped from {expected:.4g} to {loss:.4g} at the first step after resuming: "
                "check whether base, data and libraries have changed",
                "warning",
            )

    def _validate_if_due(self) -> None:
        step = self.state.step
        due = step % self._spec.run.validation.every_steps == 0 or step == self._training.schedule.num_steps
        if due and self.state.validated_step != step:
            self._validate()

    def _validate(self) -> None:
        """Measure the cases; the declared direction decides what is best. SIGTERM ends it early, without a result."""
        validator, step, num_steps = self._training.validator, self.state.step, self._training.schedule.num_steps
        if validator is None:
            if step == num_steps:
                self._take_as_best()
            return
        began_at = boot_seconds()
        self._program.phase(Phase.VALIDATE)
        values = validator.measure(self._should_continue)
        if values is None:
            return
        policy = self._spec.run.validation
        value = values[policy.best_metric]
        is_best = step > 0 and is_better(value, self.state.best_value, policy.best_direction)
        self.state = self.state.model_copy(update={"validated_step": step})
        if step == 0:
            self.first_loss = values[LOSS]
        if is_best:
            self._take_as_best(value)
        wants_samples = is_best or step in (0, num_steps)
        self._program.validation(
            step,
            values,
            is_best=is_best,
            samples=validator.samples() if wants_samples else (),
            adapter_norms=adapter_norms(self._training.adapted),
        )
        self._program.phase(Phase.TRAIN)
        self._reserve_s = boot_seconds() - began_at

    def _should_continue(self, done: int, total: int) -> bool:
        """Called between batches of a validation: report progress, and return whether to continue."""
        self._program.progress(done, total, "case")
        return not self._program.terminating

    def _take_as_best(self, value: float | None = None) -> None:
        self.state = self.state.model_copy(update={"best_step": self.state.step, "best_value": value})
        self._best_is_saved = False

    def _save_if_due(self) -> None:
        step, schedule = self.state.step, self._training.schedule
        context = SaveContext(
            step=step,
            num_steps=schedule.num_steps,
            since_save_s=boot_seconds() - self._saved_at,
            ended_epoch=schedule.epoch_ended_by(step),
            num_epochs=math.ceil(self._spec.run.recipe.epochs),
        )
        due = is_due(self._spec.run.checkpoints, context)
        if not self._best_is_saved or (due and self._saved_step != step):
            self._save(["step"] if due else [])

    def _save(self, kinds: list[str]) -> None:
        began_at, training = boot_seconds(), self._training
        self._program.phase(Phase.SAVE)
        if self.state.best_step == self.state.step:
            kinds = ["best", *kinds]
        self.state = self.state.model_copy(update={"train_s": self._spent_before + self.train_s})
        epoch, position = training.schedule.position_after(self.state.step)
        training.group.broadcast_command(Command.RANDOM)
        random = training.group.random_state()
        saved = state_of(self._spec.run, self.state, epoch, position, random.plain, training.group.size)
        self.checkpoints.save(saved, training.adapted, training.optimizer, random.tensors, [*kinds, "last"])
        self._saved_step, self._saved_at, self._best_is_saved = self.state.step, boot_seconds(), True
        self._program.phase(Phase.TRAIN)
        self._held_s += self._saved_at - began_at

    def _wait_for_writer(self) -> None:
        """Wait for the checkpoint writer, in the save phase: that may take longer than the deadline of a step."""
        began_at = boot_seconds()
        if self.checkpoints.is_writing:
            self._program.phase(Phase.SAVE)
            self.checkpoints.wait()
            self._program.phase(Phase.TRAIN)
        self.checkpoints.wait()
        self._held_s += boot_seconds() - began_at

    def _poll_requests(self) -> None:
        for request in self._program.requests():
            match request.kind:
                case RequestKind.CHECKPOINT:
                    self._program.ack(request.id, self._checkpoint_now())
                case RequestKind.SKIP:
                    self._program.ack(request.id, "training has begun: use stop or cancel")
                case _:
                    self._requests.append(request)

    def _checkpoint_now(self) -> str:
        step = self.state.step
        if step == 0:
            return "nothing was trained yet"
        if self._saved_step != step:
            self._save([])
        self._wait_for_writer()  # acknowledge only when the checkpoint is written
        folder = self.checkpoints.path_of(step)
        return folder.name if folder is not None else f"step {step} is where it resumed from"

    def _budget(self) -> StopReason | None:
        budgets, state = self._spec.run.budgets, self.state
        needed = self._training.schedule.num_tokens(state.step)
        if state.num_tokens + needed > budgets.tokens:
            self._refuse_if_untrained(f"budgets.tokens is {budgets.tokens}, one step needs {needed}")
            return StopReason.TOKENS
        reserve_s = self._reserve_s if state.step > 0 else 0.0  # make at least one step, if there is any time
        if self._spec.spent_wall_s + self.train_s + reserve_s >= budgets.wall_s:
            self._refuse_if_untrained(f"budgets.wall_s is {budgets.wall_s:g}, used up before the first step")
            return StopReason.WALL
        return None

    def _refuse_if_untrained(self, why: str) -> None:
        if self.state.step == 0:
            raise ProgramFailure(ErrorClass.CONFIG, f"{why}: raise the budget")

    def _conclude(self, stop_reason: StopReason) -> None:
        """Finish a training with a result: validate once more unless it was stopped, and make sure of a best step."""
        if self.state.validated_step != self.state.step and (
            stop_reason is not StopReason.STOP or self.state.best_step is None
        ):
            self._validate()
        if self._training.validator is None and self.state.best_step != self.state.step:
            self._take_as_best()
        if self._saved_step != self.state.step or not self._best_is_saved:
            self._save([])
