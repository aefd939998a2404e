"""The native trainer: check, load, train, publish. One attempt at one run, from its spec to its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tunesmith.data.dataset import fingerprint_of
from tunesmith.domain.program import Phase, Result, ResultStatus
from tunesmith.domain.spec import RunSpec
from tunesmith.domain.task import ErrorClass
from tunesmith.errors import ConfigError, DataError
from tunesmith.modeling.chat import ChatFormat
from tunesmith.modeling.loading import load_tokenizer
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.trainers.inputs import Inputs, read_inputs
from tunesmith.trainers.native.assemble import Assembly, Data, Interrupted, assemble, leading_voice, read_data
from tunesmith.trainers.native.loop import Ending, Loop
from tunesmith.trainers.native.preflight import check_before_loading
from tunesmith.trainers.native.state import ADAPTER, BEST, SavedState, Standing, read_state, restore
from tunesmith.trainers.native.team import led_team
from tunesmith.trainers.native.validation import LOSS, check_metric


def train(program: Program) -> Result:
    """Entry point, called by `tunesmith.trainers.main`."""
    run = program.train_spec.run
    _refuse_what_it_cannot_do(run)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    program.phase(Phase.HASH)
    inputs = _read_inputs(run)
    program.phase(Phase.LOAD)
    tokenizer = load_tokenizer(Path(run.base.path))
    chat = ChatFormat(tokenizer)
    voice = leading_voice(program)
    data = read_data(run, chat, voice)
    check_before_loading(program, len(data.items), [item.longest for item in data.items])
    spec = program.train_spec
    saved = read_state(spec.resume, run, run.num_processes) if spec.resume else None
    try:
        with led_team(spec, program.dir) as team:
            loop = _prepare(program, assemble(spec, chat, data, team, voice), saved)
            ending = loop.run()
    except Interrupted:
        return program.result(ResultStatus.INTERRUPTED, detail={"reason": Ending.TERMINATED.value})
    return _result(program, loop, ending, inputs, data, str(tokenizer.chat_template))


def _refuse_what_it_cannot_do(run: RunSpec) -> None:
    if run.trainer_options:
        raise ConfigError(
            f"trainer.options: the native trainer has none, found {', '.join(sorted(run.trainer_options))}"
        )
    check_metric(run)


def _read_inputs(run: RunSpec) -> Inputs:
    """As for every trainer, and the dataset's fingerprint from every text in it rather than from its manifest."""
    inputs = read_inputs(run)
    found = fingerprint_of(Path(run.dataset.path))
    if found != run.dataset.fingerprint:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {run.dataset.id} is not what its fingerprint says")
    return replace(inputs, dataset_fingerprint=found)


def _prepare(program: Program, work: Assembly, saved: SavedState | None) -> Loop:
    """The loop at its beginning, or where the checkpoint stands."""
    spec = program.train_spec
    if spec.resume is None or saved is None:
        return Loop(program, work, Standing(), None)
    folder, standing = Path(spec.resume.path), saved.standing
    here = work.order.batch(max(0, standing.step - 1))
    if standing.step > work.order.num_steps or (here.epoch, here.position + 1) != (saved.epoch, saved.position):
        raise DataError(f"checkpoint {folder.name} stands at a place that this data does not have; start a new run")
    restore(folder, saved, work.adapted, work.optimizer)
    program.log(f"resumed at step {standing.step} of {work.order.num_steps}")
    best = None
    if standing.best_step is not None:
        best = folder / (ADAPTER if standing.best_step == standing.step else BEST)
    return Loop(program, work, standing, best)


def _result(program: Program, loop: Loop, ending: Ending, inputs: Inputs, data: Data, chat_template: str) -> Result:
    standing = loop.standing
    fields: dict[str, Any] = {
        "base_digest": inputs.base_digest,
        "start_digest": inputs.start_digest,
        "dataset_fingerprint": inputs.dataset_fingerprint,
        "best_step": standing.best_step,
        "num_steps": standing.step,
        "num_trained_tokens": standing.num_trained_tokens,
        "num_trained_examples": min(standing.num_seen, len(data.items)),
        "num_dropped_examples": len(data.dropped),
        "train_s": loop.train_s,
        "metrics": _metrics(loop, program.train_spec.run.validation.best_metric),
        "detail": {
            "num_tokens": standing.num_tokens,
            "num_seen": standing.num_seen,
            "preflight": loop.preflight.as_json() if loop.preflight else None,
        },
    }
    match ending:
        case Ending.PAUSE | Ending.CANCEL | Ending.TERMINATED:
            fields["detail"]["reason"] = ending.value
            return program.result(ResultStatus.INTERRUPTED, **fields)
        case Ending.WALL | Ending.TOKENS:
            fields["detail"]["budget"] = ending.value
        case Ending.STOP:
            fields["detail"]["reason"] = ending.value
        case Ending.FINISHED:
            pass
    if loop.shelf.best_adapter is None:
        if program.terminating:
            fields["detail"]["reason"] = Ending.TERMINATED.value
            return program.result(ResultStatus.INTERRUPTED, **fields)
        raise ProgramFailure(
            ErrorClass.NONFINITE,
            f"{LOSS} was never a finite number, so no step can be called the best; lower recipe.lr",
        )
    program.phase(Phase.SAVE, "artifact")
    meta = {"run_id": program.train_spec.run.run_id, "step": standing.best_step, "base_digest": inputs.base_digest}
    fields["artifact"] = loop.shelf.publish_artifact(chat_template, meta)
    status = ResultStatus.STOPPED if ending is Ending.STOP else ResultStatus.SUCCEEDED
    return program.result(status, **fields)


def _metrics(loop: Loop, best_metric: str) -> dict[str, float]:
    known = {
        "loss": loop.last_loss,
        best_metric: loop.standing.best_value,
        f"{LOSS}_before": loop.first_loss,
    }
    return {name: value for name, value in known.items() if value is not None}
