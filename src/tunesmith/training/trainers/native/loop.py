"""The training loop: step after step until something ends it; `course` looks after everything around them."""

from __future__ import annotations

from pathlib import Path

from tunesmith.core.errors import DataError
from tunesmith.models.tuned import tensors_of
from tunesmith.programs.host import Program
from tunesmith.training.trainers.native.controller import Course, Ending, StepTold
from tunesmith.training.trainers.native.distributed import Call
from tunesmith.training.trainers.native.optimizer import learning_rate
from tunesmith.training.trainers.native.state import check_restored
from tunesmith.training.trainers.native.training_setup import Assembly


def run_steps(program: Program, work: Assembly, course: Course) -> Ending:
    """Train until something ends it; what was learnt is saved by then, unless it was cancelled."""
    try:
        _check_resumed(program, work, course)
        course.begin()
        while (ending := course.ending()) is None:
            _step(work, course)
        course.close(ending)
    finally:
        course.shelf.close()
    return ending


def _step(work: Assembly, course: Course) -> None:
    done = course.standing.step
    work.training.team.call(Call.STEP)
    made = work.make_step(done)
    if made.broken is not None:
        course.tell(done + 1, made.metrics)
        made.raise_if_broken(done + 1)
    lr, num_trained = made.metrics["lr"], made.num_trained_tokens
    course.step_made(StepTold(made.loss, lr, made.num_tokens, num_trained, made.num_items, made.metrics))


def _check_resumed(program: Program, work: Assembly, course: Course) -> None:
    """What many trainers get wrong in silence: weights of the file in memory, and the schedule at its place."""
    resume, standing = program.train_spec.resume, course.standing
    if resume is None:
        return
    check_restored(Path(resume.path), tensors_of(work.training.adapted))
    rate = learning_rate(program.train_spec.run.recipe, standing.step - 1, work.order.num_steps)
    if standing.last_lr is not None and rate != standing.last_lr:
        raise DataError(
            f"checkpoint {Path(resume.path).name}: the learning rate of step {standing.step} was "
            f"{standing.last_lr:g} there and is {rate:g} now; start a new run"
        )
