"""What surrounds each of TRL's steps: raw numbers told, validation, checkpoints, wishes, budgets; and why it ends."""

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
from tunesmith.domain.program import Phase
from tunesmith.domain.request import RequestKind, strongest
from tunesmith.domain.task import ErrorClass
from tunesmith.modeling.adapters import adapter_norms, trained_parameters
from tunesmith.modeling.packs import Item
from tunesmith.programs.host import ControlRequest, Program, ProgramFailure
from tunesmith.trainers.native.cadence import Moment, is_due
from tunesmith.trainers.native.checkpoints import CheckpointShelf
from tunesmith.trainers.native.loop import Ending
from tunesmith.trainers.native.random_state import seed_everything
from tunesmith.trainers.native.state import SavedState, Standing, restore, state_of
from tunesmith.trainers.native.team import Team
from tunesmith.trainers.native.validation import LOSS, Validator, is_better
from tunesmith.trainers.trl.plan import Plan
from tunesmith.trainers.trl.rows import num_tokens

_NAMED_EXAMPLES = 8
INTERRUPTIONS = frozenset({Ending.PAUSE, Ending.CANCEL, Ending.TERMINATED})


@dataclass(frozen=True)
class Work:
    """What the session looks after."""

    adapted: Any
    optimizer: Any
    items: Sequence[Item]
    plan: Plan
    validator: Validator | None
    """None without a validation split: then the last step is the best."""


class Session:
    """One attempt at a training; an engine's watcher."""

    def __init__(self, program: Program, work: Work, saved: SavedState | None, best_adapter: Path | None) -> None:
        self._program, self._work = program, work
        self._spec = program.train_spec
        self._saved = saved
        self.standing = saved.standing if saved else Standing()
        self.shelf = CheckpointShelf(program, best_adapter)
        self.first_loss: float | None = None
        self._losses: list[float] = []
        self._norm = self._lr = math.nan
        self._step_at = self._began_at = self._saved_at = boot_seconds()
        self._spent_before = self.standing.train_s
        self._is_first = True
        self._saved_step = self.standing.step if saved else -1
        self._best_is_saved = True
        self._reserve_s = 0.0
        """How long the last validation took: kept back from the time budget."""
        self._wishes: list[ControlRequest] = []
        self._ending: Ending | None = None

    @property
    def train_s(self) -> float:
        """Seconds of this attempt."""
        return boot_seconds() - self._began_at

    def put_back(self) -> None:
        """Weights, optimizer and random numbers as they are at the beginning, or as the checkpoint has them."""
        if self._saved is not None and self._spec.resume is not None:
            restore(Path(self._spec.resume.path), self._saved, self._work.adapted, self._work.optimizer)
        else:
            seed_everything(self._spec.run.recipe.seed)

    def begin(self) -> bool:
        """Before the first step; whether there is one to make."""
        self.put_back()
        self._program.phase(Phase.TRAIN)
        self._validate_if_due()
        return self._goes_on()

    # --- called by the engine ---

    def step_begins(self) -> None:
        if self._is_first:
            self.put_back()  # once more: what TRL sets up before its first step draws numbers and moves tensors
            self._is_first = False
        self._losses, self._norm = [], math.nan
        self._lr = float(self._work.optimizer.param_groups[0]["lr"])
        self._step_at = boot_seconds()

    def portion_done(self, loss: float) -> None:
        self._losses.append(loss)
        if not math.isfinite(loss):
            size = self._work.plan.portions.size
            first = (len(self._losses) - 1) * size
            self._break(f"the loss is {loss}", self._indices()[first : first + size])

    def before_update(self) -> None:
        parameters = [tensor for _, tensor in trained_parameters(self._work.adapted)]
        self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._spec.run.recipe.clip))
        if not math.isfinite(self._norm):
            self._break(f"the gradient norm is {self._norm}", self._indices())

    def step_done(self) -> bool:
        items = [self._work.items[index] for index in self._indices()]
        standing, tokens = self.standing, sum(map(num_tokens, items))
        self.standing = standing.model_copy(
            update={
                "step": standing.step + 1,
                "num_tokens": standing.num_tokens + tokens,
                "num_trained_tokens": standing.num_trained_tokens + sum(item.num_trained for item in items),
                "num_seen": standing.num_seen + len(items),
                "last_loss": math.fsum(self._losses),
                "last_lr": self._lr,
            }
        )
        self._tell(self.standing.step, self.standing.num_tokens, tokens)
        self._program.progress(self.standing.step, self._work.plan.num_steps)
        self.shelf.look()
        self._validate_if_due()
        self._save_if_due()
        return self._goes_on()

    # --- numbers ---

    def _indices(self) -> list[int]:
        return self._work.plan.step(self.standing.step)

    def _tell(self, step: int, total: int, tokens: int) -> None:
        values = {
            "loss": math.fsum(self._losses),
            "grad_norm": self._norm,
            "lr": self._lr,
            "tokens": float(total),
            "tokens_per_s": tokens / max(boot_seconds() - self._step_at, 1e-9),
            "memory_mb": _memory_mb(),
        }
        self._program.metrics(step, values)

    def _break(self, why: str, indices: Sequence[int]) -> None:
        """Tell the raw numbers, then end; the weights are as they were before the step."""
        step = self.standing.step + 1
        self._tell(step, self.standing.num_tokens, 0)
        ids = [self._work.items[index].id for index in indices]
        more = len(ids) - _NAMED_EXAMPLES
        raise ProgramFailure(
            ErrorClass.NONFINITE,
            f"{why} at step {step}; examples: {', '.join(ids[:_NAMED_EXAMPLES])}"
            f"{f' and {more} more' if more > 0 else ''}; the last good checkpoint remains; lower recipe.lr or look at "
            "these examples and at the base's weights",
        )

    # --- validation and checkpoints ---

    def _validate_if_due(self) -> None:
        step = self.standing.step
        due = step % self._spec.run.validation.every_steps == 0 or step == self._work.plan.num_steps
        if due and self.standing.validated_step != step:
            self._validate()

    def _validate(self) -> None:
        """Measure the cases; the declared direction decides what is best. A TERM cuts it short, without a trace."""
        validator, step = self._work.validator, self.standing.step
        if validator is None:
            if step == self._work.plan.num_steps:
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
        wants_samples = is_best or step in (0, self._work.plan.num_steps)
        self._program.validation(
            step,
            values,
            is_best=is_best,
            samples=validator.samples(self._work.adapted) if wants_samples else (),
            adapter_norms=adapter_norms(self._work.adapted),
        )
        self._program.phase(Phase.TRAIN)
        self._reserve_s = boot_seconds() - began_at

    def _heard_nothing(self, done: int, total: int) -> bool:
        self._program.progress(done, total, "case")
        return not self._program.terminating

    def _take_as_best(self, value: float | None = None) -> None:
        self.standing = self.standing.model_copy(update={"best_step": self.standing.step, "best_value": value})
        self._best_is_saved = False

    def _save_if_due(self) -> None:
        step, plan = self.standing.step, self._work.plan
        moment = Moment(
            step=step,
            num_steps=plan.num_steps,
            since_save_s=boot_seconds() - self._saved_at,
            ended_epoch=plan.epoch_ended_by(step),
            num_epochs=math.ceil(self._spec.run.recipe.epochs),
        )
        due = is_due(self._spec.run.checkpoints, moment)
        if not self._best_is_saved or (due and self._saved_step != step):
            self._save(["step"] if due else [])

    def _save(self, kinds: list[str]) -> None:
        self._program.phase(Phase.SAVE)
        if self.standing.best_step == self.standing.step:
            kinds = ["best", *kinds]
        self.standing = self.standing.model_copy(update={"train_s": self._spent_before + self.train_s})
        epoch, position = self._work.plan.place(self.standing.step)
        random = Team().random_state()
        state = state_of(self._spec.run, self.standing, epoch, position, random.plain)
        self.shelf.save(state, self._work.adapted, self._work.optimizer, random.tensors, [*kinds, "last"])
        self._saved_step, self._saved_at, self._best_is_saved = self.standing.step, boot_seconds(), True
        self._program.phase(Phase.TRAIN)

    # --- why it ends ---

    def _goes_on(self) -> bool:
        self._ending = self._reason_to_end()
        return self._ending is None

    def _reason_to_end(self) -> Ending | None:
        if self._program.terminating:
            return Ending.TERMINATED
        self._listen()
        decision = strongest([wish.kind for wish in self._wishes])
        if decision is RequestKind.STOP and self.standing.step == 0:
            decision = None  # there is no best so far yet: one step first
        if decision is not None:
            return Ending(decision.value)
        if self.standing.step >= self._work.plan.num_steps:
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
        if self.standing.step == 0:
            return "nothing was trained yet"
        if self._saved_step != self.standing.step:
            self._save([])
        return f"step {self.standing.step} is saved"

    def _budget(self) -> Ending | None:
        budgets, standing = self._spec.run.budgets, self.standing
        needed = sum(num_tokens(self._work.items[index]) for index in self._indices())
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

    def close(self) -> Ending:
        """After the last step: what was learnt is saved, unless it was cancelled, and every wish is answered."""
        ending = self._ending or Ending.FINISHED
        if ending not in INTERRUPTIONS:
            self._conclude(ending)
        elif ending is not Ending.CANCEL and self.standing.step > max(0, self._saved_step):
            self._save([])  # nothing to save where nothing was trained since the last time
        self.shelf.settle()
        for wish in self._wishes:
            fulfilled = wish.kind.value == ending.value
            self._program.ack(wish.id, f"at step {self.standing.step}" if fulfilled else f"overtaken: {ending.value}")
        return ending

    def _conclude(self, ending: Ending) -> None:
        """A last look unless a stop is in a hurry, and a best one for sure."""
        if self.standing.validated_step != self.standing.step and (
            ending is not Ending.STOP or self.standing.best_step is None
        ):
            self._validate()
        if self._work.validator is None and self.standing.best_step != self.standing.step:
            self._take_as_best()
        if self._saved_step != self.standing.step or not self._best_is_saved:
            self._save([])


def _memory_mb() -> float:
    """The most the device's allocator held, or what this process holds now on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # no /proc: the largest so far
