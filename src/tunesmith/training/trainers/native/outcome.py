"""From the end of a training to its result: the artefact of its best step, or why there is none."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import Result, ResultStatus
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.inputs import Inputs
from tunesmith.training.trainers.native.controller import INTERRUPTIONS, StopReason, TrainingController
from tunesmith.training.trainers.native.preflight import Preflight
from tunesmith.training.trainers.native.training_setup import Data
from tunesmith.training.trainers.native.validation import LOSS


def interrupted_early(program: Program) -> Result:
    """The result of an attempt that got SIGTERM before its first step."""
    return program.result(ResultStatus.INTERRUPTED, detail={"reason": StopReason.TERMINATED.value})


def conclude(
    program: Program,
    controller: TrainingController,
    stop_reason: StopReason,
    inputs: Inputs,
    data: Data,
    chat_template: str,
    preflight: Preflight | None,
) -> Result:
    """Return the result of a training that made at least one step, or was asked to stop before."""
    run, state = program.train_spec.run, controller.state
    fields = _fields(controller, inputs, data, run.validation.best_metric)
    fields["detail"]["preflight"] = preflight.as_json() if preflight else None
    if stop_reason in (StopReason.WALL, StopReason.TOKENS):
        fields["detail"]["budget"] = stop_reason.value
    elif stop_reason is not StopReason.FINISHED:
        fields["detail"]["reason"] = stop_reason.value
    if stop_reason in INTERRUPTIONS:
        return program.result(ResultStatus.INTERRUPTED, **fields)
    if controller.checkpoints.best_adapter is None:
        if program.terminating:
            fields["detail"]["reason"] = StopReason.TERMINATED.value
            return program.result(ResultStatus.INTERRUPTED, **fields)
        raise ProgramFailure(
            ErrorClass.NONFINITE,
            f"{run.validation.best_metric} was never a finite number, so no step can be called the best; "
            "lower recipe.lr",
        )
    program.phase(Phase.SAVE, "artifact")
    meta = {"run_id": run.run_id, "step": state.best_step, "base_digest": inputs.base_digest}
    fields["artifact"] = controller.checkpoints.publish_artifact(chat_template, meta)
    status = ResultStatus.STOPPED if stop_reason is StopReason.STOP else ResultStatus.SUCCEEDED
    return program.result(status, **fields)


def _fields(controller: TrainingController, inputs: Inputs, data: Data, best_metric: str) -> dict[str, Any]:
    state = controller.state
    known = {"loss": state.last_loss, best_metric: state.best_value, f"{LOSS}_before": controller.first_loss}
    return {
        **asdict(inputs),
        "best_step": state.best_step,
        "num_steps": state.step,
        "num_trained_tokens": state.num_trained_tokens,
        "num_trained_examples": min(state.num_seen, len(data.items)),
        "num_dropped_examples": len(data.dropped),
        "train_s": controller.train_s,
        "metrics": {name: value for name, value in known.items() if value is not None},
        "detail": {"num_tokens": state.num_tokens, "num_seen": state.num_seen},
    }
