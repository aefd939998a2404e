"""What surrounds the steps of a training, whoever makes them: numbers told, validation, checkpoints, wishes, budgets.

The native loop makes its steps itself, TRL makes its own; both call here before, between and after them.
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
from tunesmith.training.rules.save_schedule import Moment, is_due
from tunesmith.training.trainers.native.checkpoints import CheckpointShelf
from tunesmith.training.trainers.native.distributed import Call, Team
from tunesmith.training.trainers.native.state import ADAPTER, BEST, SavedState, Standing, state_of
from tunesmith.training.trainers.native.validation import LOSS, Validator, is_better


class Ending(StrEnum):
    """Why a training ends."""

    FINISHED = "finished"
    WALL = "wall"  # the time budget is used up
    TOKENS = "tokens"  # the token budget is used up
    STOP = "stop"
    PAUSE = "pause"
    CANCEL = "cancel"
    TERMINATED = "terminated"


INTERRUPTIONS = frozenset({Ending.PAUSE, Ending.CANCEL, Ending.TERMINATED})


class Track(Protocol):
    """Which examples each step sees, as far as its surroundings must know."""

    num_steps: int

    def place(self, step: int) -> tuple[int, int]:
        """Where the data stands after so many steps: the pass over it, and how far into that."""

    def epoch_ended_by(self, step: int) -> int | None:
        """The pass, counted from 1, that ends with the last of so many steps."""

    def num_tokens(self, step: int) -> int:
        """Tokens that the step after so many others needs."""


@dataclass(frozen=True)
class Training:
    """What is trained, by which order, and how it is validated."""

    adapted: Any
    optimizer: Any
    track: Track
    validator: Validator | None
    """None without a validation split: then the last step is the best."""
    team: Team


@dataclass(frozen=True)
class StepTold:
    """What a step was, as whoever made it tells."""

    loss: float
    lr: float
    num_tokens: int
    num_trained_tokens: int
    num_examples: int
    metrics: dict[str, float]


class Course:
    """One attempt at a training, from its beginning or from the checkpoint where it stands."""

    def __init__(self, program: Program, training: Training, saved: SavedState | None) -> None:
        self._program, self._training = program, training
        self._spec = program.train_spec
        self.standing = saved.standing if saved else Standing()
        self.shelf = CheckpointShelf(program, self._best_of(saved) if saved else None)
        self.first_loss: float | None = None
        """The validation loss before training, if this attempt saw the beginning."""
        self._started_at = self._saved_at = boot_seconds()
        self._spent_before = self.standing.train_s
        self._saved_step = self.standing.step if saved else -1
        self._best_is_saved = True
        self._held_s = 0.0
        """How long saving held up the training since the last step was told."""
        self._expected_loss = self.standing.last_loss
        """Of the step before a resume; the first one after it is compared with that."""
        self._reserve_s = 0.0
        """How long the last validation took: kept back from the time budget."""
        self._wishes: list[ControlRequest] = []

    def _best_of(self, saved: SavedState) -> Path | None:
        """The best adapter of the checkpoint to go on from, which must stand at a place that this data has."""
        assert self._spec.resume is not None
        folder, standing, track = Path(self._spec.resume.path), saved.standing, self._training.track
        if standing.step > track.num_steps or track.place(standing.step) != (saved.epoch, saved.position):
            raise DataError(f"checkpoint {folder.name} stands at a place that this data does not have; start a new run")
        self._program.log(f"resumed at step {standing.step} of {track.num_steps}")
        if standing.best_step is None:
            return None
        return folder / (ADAPTER if standing.best_step == standing.step else BEST)

    @property
    def train_s(self) -> float:
        """Seconds of this attempt."""
        return boot_seconds() - self._started_at

    def begin(self) -> None:
        """Before the first step; a validation that a TERM cut short is made up for."""
        self._program.phase(Phase.TRAIN)
        self._validate_if_due()
        self._save_if_due()

    def step_made(self, told: StepTold) -> None:
        """After a good step: tell it, validate and save where that is due."""
        standing = self.standing
        self.standing = standing.model_copy(
            update={
                "step": standing.step + 1,
                "num_tokens": standing.num_tokens + told.num_tokens,
                "num_trained_tokens": standing.num_trained_tokens + told.num_trained_tokens,
                "num_seen": standing.num_seen + told.num_examples,
                "last_loss": told.loss,
                "last_lr": told.lr,
            }
        )
        self.tell(self.standing.step, told.metrics)
        self._program.progress(self.standing.step, self._training.track.num_steps)
        self._compare(told.loss)
        self._validate_if_due()
        self._save_if_due()
        self.shelf.look()

    def tell(self, step: int, metrics: dict[str, float]) -> None:
        """The numbers of a step, raw, also of one that broke."""
        held_s, self._held_s = self._held_s, 0.0
        saving = {"save_s": held_s, "write_s": self.shelf.take_write_s()}
        self._program.metrics(step, metrics | {"tokens": float(self.standing.num_tokens)} | saving)

    def ending(self) -> Ending | None:
        """Why to end now; None to go on."""
        if self._program.terminating:
            return Ending.TERMINATED
        self._listen()
        decision = strongest([wish.kind for wish in self._wishes])
        if decision is RequestKind.STOP and self.standing.step == 0:
            decision = None  # there is no best so far yet: one step first
        if decision is not None:
            return Ending(decision.value)
        if self.standing.step >= self._training.track.num_steps:
            return Ending.FINISHED
        return self._budget()

    def close(self, ending: Ending) -> None:
        """After the last step: what was learnt is saved, unless it was cancelled, and every wish is answered."""
        if ending not in INTERRUPTIONS:
            self._conclude(ending)
        elif ending is not Ending.CANCEL and self.standing.step > max(0, self._saved_step):
            self._save([])  # nothing to save where nothing was trained since the last time
        self._settle()
        for wish in self._wishes:  # one that a stronger wish overtook hears so
            fulfilled = wish.kind.value == ending.value
            self._program.ack(wish.id, f"at step {self.standing.step}" if fulfilled else f"overtaken: {ending.value}")

    def _compare(self, loss: float) -> None:
        expected, self._expected_loss = self._expected_loss, None
        if expected is not None and loss > 2 * expected + 1:
            self._program.log(
                f"the loss jumped from {expected:.4g} to {loss:.4g} at the first step after resuming: "
                "look whether base, data and libraries are still what they were",
                "warning",
            )

    def _validate_if_due(self) -> None:
        step = self.standing.step
        due = step % self._spec.run.validation.every_steps == 0 or step == self._training.track.num_steps
        if due and self.standing.validated_step != step:
            self._validate()

    def _validate(self) -> None:
        """Measure the cases; the declared direction decides what is best. A TERM cuts it short, without a trace."""
        validator, step, num_steps = self._training.validator, self.standing.step, self._training.track.num_steps
        if validator is None:
            if step == num_steps:
                self._take_as_best()
            return
        began_at = boot_seconds()
        self._program.phase(Phase.VALIDATE)
        values = validator.measure(self._heard_nothing)
        if values is None:
            return
        policy = self._spec.run.validation
        value = values[policy.best_metric]
        is_best = step > 0 and is_better(value, self.standing.best_value, policy.best_direction)
        self.standing = self.standing.model_copy(update={"validated_step": step})
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

    def _heard_nothing(self, done: int, total: int) -> bool:
        """Called between batches of a validation: whether to go on with it."""
        self._program.progress(done, total, "case")
        return not self._program.terminating

    def _take_as_best(self, value: float | None = None) -> None:
        self.standing = self.standing.model_copy(update={"best_step": self.standing.step, "best_value": value})
        self._best_is_saved = False

    def _save_if_due(self) -> None:
        step, track = self.standing.step, self._training.track
        moment = Moment(
            step=step,
            num_steps=track.num_steps,
            since_save_s=boot_seconds() - self._saved_at,
            ended_epoch=track.epoch_ended_by(step),
            num_epochs=math.ceil(self._spec.run.recipe.epochs),
        )
        due = is_due(self._spec.run.checkpoints, moment)
        if not self._best_is_saved or (due and self._saved_step != step):
            self._save(["step"] if due else [])

    def _save(self, kinds: list[str]) -> None:
        began_at, training = boot_seconds(), self._training
        self._program.phase(Phase.SAVE)
        if self.standing.best_step == self.standing.step:
            kinds = ["best", *kinds]
        self.standing = self.standing.model_copy(update={"train_s": self._spent_before + self.train_s})
        epoch, position = training.track.place(self.standing.step)
        training.team.call(Call.RANDOM)
        random = training.team.random_state()
        state = state_of(self._spec.run, self.standing, epoch, position, random.plain, training.team.size)
        self.shelf.save(state, training.adapted, training.optimizer, random.tensors, [*kinds, "last"])
        self._saved_step, self._saved_at, self._best_is_saved = self.standing.step, boot_seconds(), True
        self._program.phase(Phase.TRAIN)
        self._held_s += self._saved_at - began_at

    def _settle(self) -> None:
        """Wait for the writer, as saving: that may take longer than a step ever does."""
        began_at = boot_seconds()
        if self.shelf.is_writing:
            self._program.phase(Phase.SAVE)
            self.shelf.settle()
            self._program.phase(Phase.TRAIN)
        self.shelf.settle()
        self._held_s += boot_seconds() - began_at

    def _listen(self) -> None:
        for wish in self._program.requests():
            match wish.kind:
                case RequestKind.CHECKPOINT:
                    self._program.ack(wish.id, self._checkpoint_now())
                case RequestKind.SKIP:
                    self._program.ack(wish.id, "training has begun: use stop or cancel")
                case _:
                    self._wishes.append(wish)

    def _checkpoint_now(self) -> str:
        step = self.standing.step
        if step == 0:
            return "nothing was trained yet"
        if self._saved_step != step:
            self._save([])
        self._settle()  # the answer tells that it is there
        folder = self.shelf.path_of(step)
        return folder.name if folder is not None else f"step {step} is where it resumed from"

    def _budget(self) -> Ending | None:
        budgets, standing = self._spec.run.budgets, self.standing
        needed = self._training.track.num_tokens(standing.step)
        if standing.num_tokens + needed > budgets.tokens:
            self._refuse_if_untrained(f"budgets.tokens is {budgets.tokens}, one step needs {needed}")
            return Ending.TOKENS
        reserve_s = self._reserve_s if standing.step > 0 else 0.0  # one step at least, if there is any time for it
        if self._spec.spent_wall_s + self.train_s + reserve_s >= budgets.wall_s:
            self._refuse_if_untrained(f"budgets.wall_s is {budgets.wall_s:g}, used up before the first step")
            return Ending.WALL
        return None

    def _refuse_if_untrained(self, why: str) -> None:
        if self.standing.step == 0:
            raise ProgramFailure(ErrorClass.CONFIG, f"{why}: raise the budget")

    def _conclude(self, ending: Ending) -> None:
        """The end of a training that has a result: a last look unless a stop is in a hurry, and a best one for sure."""
        if self.standing.validated_step != self.standing.step and (
            ending is not Ending.STOP or self.standing.best_step is None
        ):
            self._validate()
        if self._training.validator is None and self.standing.best_step != self.standing.step:
            self._take_as_best()
        if self._saved_step != self.standing.step or not self._best_is_saved:
            self._save([])
