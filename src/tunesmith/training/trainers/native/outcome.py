"""From the end of a training to its result: the artefact of its best step, or why there is none."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.messages import Result, ResultStatus
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.inputs import Inputs
from tunesmith.training.trainers.native.controller import INTERRUPTIONS, Course, Ending
from tunesmith.training.trainers.native.preflight import Preflight
from tunesmith.training.trainers.native.training_setup import Data
from tunesmith.training.trainers.native.validation import LOSS


def interrupted_early(program: Program) -> Result:
    """TERM came before the first step: there is nothing to tell."""
    return program.result(ResultStatus.INTERRUPTED, detail={"reason": Ending.TERMINATED.value})


def conclude(
    program: Program,
    course: Course,
    ending: Ending,
    inputs: Inputs,
    data: Data,
    chat_template: str,
    preflight: Preflight | None,
) -> Result:
    """The result of a training that made at least one step, or was told to end before."""
    run, standing = program.train_spec.run, course.standing
    fields = _fields(course, inputs, data, run.validation.best_metric)
    fields["detail"]["preflight"] = preflight.as_json() if preflight else None
    if ending in (Ending.WALL, Ending.TOKENS):
        fields["detail"]["budget"] = ending.value
    elif ending is not Ending.FINISHED:
        fields["detail"]["reason"] = ending.value
    if ending in INTERRUPTIONS:
        return program.result(ResultStatus.INTERRUPTED, **fields)
    if course.shelf.best_adapter is None:
        if program.terminating:
            fields["detail"]["reason"] = Ending.TERMINATED.value
            return program.result(ResultStatus.INTERRUPTED, **fields)
        raise ProgramFailure(
            ErrorClass.NONFINITE,
            f"{run.validation.best_metric} was never a finite number, so no step can be called the best; "
            "lower recipe.lr",
        )
    program.phase(Phase.SAVE, "artifact")
    meta = {"run_id": run.run_id, "step": standing.best_step, "base_digest": inputs.base_digest}
    fields["artifact"] = course.shelf.publish_artifact(chat_template, meta)
    status = ResultStatus.STOPPED if ending is Ending.STOP else ResultStatus.SUCCEEDED
    return program.result(status, **fields)


def _fields(course: Course, inputs: Inputs, data: Data, best_metric: str) -> dict[str, Any]:
    standing = course.standing
    known = {"loss": standing.last_loss, best_metric: standing.best_value, f"{LOSS}_before": course.first_loss}
    return {
        **asdict(inputs),
        "best_step": standing.best_step,
        "num_steps": standing.step,
        "num_trained_tokens": standing.num_trained_tokens,
        "num_trained_examples": min(standing.num_seen, len(data.items)),
        "num_dropped_examples": len(data.dropped),
        "train_s": course.train_s,
        "metrics": {name: value for name, value in known.items() if value is not None},
        "detail": {"num_tokens": standing.num_tokens, "num_seen": standing.num_seen},
    }
