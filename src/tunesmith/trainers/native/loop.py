"""The training loop: step, validate, save, listen; ends for one of the reasons in `Ending`."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path

from tunesmith.clock import boot_seconds
from tunesmith.domain.program import Phase
from tunesmith.domain.request import RequestKind, strongest
from tunesmith.domain.task import ErrorClass
from tunesmith.errors import DataError
from tunesmith.modeling.adapters import adapter_norms
from tunesmith.modeling.tuned import tensors_of
from tunesmith.programs.host import ControlRequest, Program, ProgramFailure
from tunesmith.trainers.native.assemble import Assembly
from tunesmith.trainers.native.cadence import Moment, is_due
from tunesmith.trainers.native.checkpoints import CheckpointShelf
from tunesmith.trainers.native.optimizer import learning_rate
from tunesmith.trainers.native.state import Standing, check_restored, state_of
from tunesmith.trainers.native.step import MadeStep
from tunesmith.trainers.native.team import Call
from tunesmith.trainers.native.validation import LOSS, is_better


class Ending(StrEnum):
    FINISHED = "finished"
    WALL = "wall"  # the time budget is used up
    TOKENS = "tokens"  # the token budget is used up
    STOP = "stop"
    PAUSE = "pause"
    CANCEL = "cancel"
    TERMINATED = "terminated"


_INTERRUPTIONS = frozenset({Ending.PAUSE, Ending.CANCEL, Ending.TERMINATED})


class Loop:
    """One attempt at a training."""

    def __init__(self, program: Program, work: Assembly, standing: Standing, best_adapter: Path | None) -> None:
        self._program, self._work = program, work
        self._spec = program.train_spec
        self.standing, self.preflight = standing, work.preflight
        self.shelf = CheckpointShelf(program, best_adapter)
        self.last_loss: float | None = None
        self.first_loss: float | None = None
        """The validation loss before training, if this attempt saw the beginning."""
        self._started_at = boot_seconds()
        self._spent_before = standing.train_s
        self._saved_step = standing.step if self._spec.resume else -1
        self._saved_at = self._started_at
        self._best_is_saved = True
        self._held_s = 0.0
        """How long saving held up the training since the last step was told."""
        self._expected_loss = standing.last_loss if self._spec.resume else None
        self._reserve_s = 0.0
        """How long validating and saving took last: kept back from the time budget."""
        self._wishes: list[ControlRequest] = []

    @property
    def train_s(self) -> float:
        """Seconds of this attempt."""
        return boot_seconds() - self._started_at

    def run(self) -> Ending:
        """Train until something ends it; what was learnt is saved by then, unless it was cancelled."""
        try:
            ending = self._train()
            self._settle()
        finally:
            self.shelf.close()
        self._acknowledge(ending)
        return ending

    def _train(self) -> Ending:
        self._program.phase(Phase.TRAIN)
        self._check_resumed()
        self._validate_if_due()
        self._save_if_due()
        while (ending := self._ending()) is None:
            self._step()
            self._validate_if_due()
            self._save_if_due()
            self.shelf.look()
        if ending not in _INTERRUPTIONS:
            self._close(ending)
        elif ending is not Ending.CANCEL and self.standing.step > max(0, self._saved_step):
            self._save([])  # nothing to save where nothing was trained since the last time
        return ending

    def _check_resumed(self) -> None:
        """What many trainers get wrong in silence: weights of the file in memory, and the schedule at its place."""
        resume, standing = self._spec.resume, self.standing
        if resume is None:
            return
        check_restored(Path(resume.path), tensors_of(self._work.adapted))
        rate = learning_rate(self._spec.run.recipe, standing.step - 1, self._work.order.num_steps)
        if standing.last_lr is not None and rate != standing.last_lr:
            raise DataError(
                f"checkpoint {Path(resume.path).name}: the learning rate of step {standing.step} was "
                f"{standing.last_lr:g} there and is {rate:g} now; start a new run"
            )

    def _step(self) -> None:
        work, standing = self._work, self.standing
        batch = work.order.batch(standing.step)
        work.team.call(Call.STEP)
        made = work.steps.make(standing.step, work.order.num_steps, [work.items[index] for index in batch.indices])
        self.last_loss = made.loss
        self.standing = standing.model_copy(
            update={
                "step": standing.step + 1,
                "num_tokens": standing.num_tokens + made.num_tokens,
                "num_trained_tokens": standing.num_trained_tokens + made.num_trained_tokens,
                "num_seen": standing.num_seen + len(batch.indices),
            }
        )
        self._program.metrics(self.standing.step, made.metrics | self._totals())
        self._program.progress(self.standing.step, work.order.num_steps)
        made.raise_if_broken(self.standing.step)
        self._note(made)

    def _totals(self) -> dict[str, float]:
        """What is told with every step beside its own numbers: tokens so far, and seconds that saving took since."""
        held_s, self._held_s = self._held_s, 0.0
        tokens = float(self.standing.num_tokens)
        return {"tokens": tokens, "save_s": held_s, "write_s": self.shelf.take_write_s()}

    def _note(self, made: MadeStep) -> None:
        """Keep what a resumed training is compared with; the first step after a resume is."""
        expected, self._expected_loss = self._expected_loss, None
        if expected is not None and made.loss > 2 * expected + 1:
            self._program.log(
                f"the loss jumped from {expected:.4g} to {made.loss:.4g} at the first step after resuming: "
                "look whether base, data and libraries are still what they were",
                "warning",
            )
        self.standing = self.standing.model_copy(update={"last_loss": made.loss, "last_lr": made.metrics["lr"]})

    def _validate_if_due(self) -> None:
        step = self.standing.step
        is_due = step % self._spec.run.validation.every_steps == 0 or step == self._work.order.num_steps
        if is_due and self.standing.validated_step != step:
            self._validate()

    def _validate(self) -> None:
        """Measure the cases; the declared direction decides what is best. A TERM cuts it short, without a trace."""
        validator, step = self._work.validator, self.standing.step
        if validator is None:
            if step == self._work.order.num_steps:
                self._take_as_best()
            return
        began_at = boot_seconds()
        self._program.phase(Phase.VALIDATE)
        values = validator.measure(self._work.adapted, self._heard_nothing)
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
        wants_samples = is_best or step in (0, self._work.order.num_steps)
        self._program.validation(
            step,
            values,
            is_best=is_best,
            samples=validator.samples(self._work.adapted) if wants_samples else (),
            adapter_norms=adapter_norms(self._work.adapted),
        )
        self._program.phase(Phase.TRAIN)
        self._reserve_s = boot_seconds() - began_at

    def _take_as_best(self, value: float | None = None) -> None:
        self.standing = self.standing.model_copy(update={"best_step": self.standing.step, "best_value": value})
        self._best_is_saved = False

    def _heard_nothing(self, done: int, total: int) -> bool:
        """Called between batches of a validation: whether to go on with it."""
        self._program.progress(done, total, "case")
        return not self._program.terminating

    def _save_if_due(self) -> None:
        due = is_due(self._spec.run.checkpoints, self._moment())
        if not self._best_is_saved or (due and self._saved_step != self.standing.step):
            self._save(["step"] if due else [])

    def _moment(self) -> Moment:
        step, order = self.standing.step, self._work.order
        ended = order.batch(step - 1).epoch if step > 0 else 0
        is_edge = step > 0 and (step >= order.num_steps or order.batch(step).epoch != ended)
        return Moment(
            step=step,
            num_steps=order.num_steps,
            since_save_s=boot_seconds() - self._saved_at,
            ended_epoch=ended + 1 if is_edge else None,
            num_epochs=math.ceil(self._spec.run.recipe.epochs),
        )

    def _save(self, kinds: list[str]) -> None:
        began_at = boot_seconds()
        self._program.phase(Phase.SAVE)
        if self.standing.best_step == self.standing.step:
            kinds = ["best", *kinds]
        self.standing = self.standing.model_copy(update={"train_s": self._spent_before + self.train_s})
        position = self._work.order.batch(max(0, self.standing.step - 1))
        team = self._work.team
        team.call(Call.RANDOM)
        random = team.random_state()
        state = state_of(self._spec.run, self.standing, position.epoch, position.position + 1, random.plain, team.size)
        self.shelf.save(state, self._work.adapted, self._work.optimizer, random.tensors, [*kinds, "last"])
        self._saved_step, self._best_is_saved = self.standing.step, True
        self._program.phase(Phase.TRAIN)
        self._saved_at = boot_seconds()
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

    def _ending(self) -> Ending | None:
        if self._program.terminating:
            return Ending.TERMINATED
        self._listen()
        decision = strongest([wish.kind for wish in self._wishes])
        if decision is RequestKind.STOP and self.standing.step == 0:
            decision = None  # there is no best so far yet: one step first
        if decision is not None:
            return Ending(decision.value)
        if self.standing.step >= self._work.order.num_steps:
            return Ending.FINISHED
        return self._budget()

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
        batch = self._work.order.batch(standing.step)
        needed = sum(len(self._work.items[index]) for index in batch.indices)
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

    def _close(self, ending: Ending) -> None:
        """The end of a training that has a result: a last look unless a stop is in a hurry, and a best one for sure."""
        if self.standing.validated_step != self.standing.step and (
            ending is not Ending.STOP or self.standing.best_step is None
        ):
            self._validate()
        if self._work.validator is None and self.standing.best_step != self.standing.step:
            self._take_as_best()
        if self._saved_step != self.standing.step or not self._best_is_saved:
            self._save([])

    def _acknowledge(self, ending: Ending) -> None:
        """A wish is answered when it is fulfilled; one that a stronger wish overtook hears so."""
        for wish in self._wishes:
            fulfilled = wish.kind.value == ending.value
            self._program.ack(wish.id, f"at step {self.standing.step}" if fulfilled else f"overtaken: {ending.value}")
