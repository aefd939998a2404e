"""One attempt at a run by TRL: load, hand over, publish; from the spec to the result."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tunesmith.domain.profile import Method
from tunesmith.domain.program import Phase, Result, ResultStatus
from tunesmith.domain.spec import RunSpec, TrainSpec
from tunesmith.domain.task import ErrorClass
from tunesmith.errors import DataError
from tunesmith.modeling.adapters import read_config
from tunesmith.modeling.chat import ChatFormat
from tunesmith.modeling.loading import load_tokenizer
from tunesmith.modeling.packs import Packer
from tunesmith.modeling.scoring import answer_log_probs
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.trainers.inputs import Inputs
from tunesmith.trainers.native.assemble import Data, Interrupted, Voice, leading_voice, look_at, read_data
from tunesmith.trainers.native.loop import Ending
from tunesmith.trainers.native.objectives import objective_of
from tunesmith.trainers.native.preflight import check_before_loading
from tunesmith.trainers.native.random_state import seed_everything
from tunesmith.trainers.native.state import ADAPTER, BEST, SavedState, read_state
from tunesmith.trainers.native.validation import LOSS, Validator, check_metric
from tunesmith.trainers.trl.engine import Engine, Setup
from tunesmith.trainers.trl.plan import Plan
from tunesmith.trainers.trl.rows import num_tokens, width
from tunesmith.trainers.trl.session import INTERRUPTIONS, Session, Work

_SCRATCH = ".trl"


def run_attempt(
    program: Program, inputs: Inputs, make_model: Callable[[RunSpec, Callable[[Any], bool]], Any]
) -> Result:
    spec, run = program.train_spec, program.train_spec.run
    check_metric(run)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    program.phase(Phase.LOAD)
    saved = read_state(spec.resume, run) if spec.resume else None
    tokenizer = load_tokenizer(Path(run.base.path))
    chat = ChatFormat(tokenizer)
    voice = leading_voice(program)
    data = read_data(run, chat, voice)
    check_before_loading(program, len(data.items), [item.longest for item in data.items])
    if run.recipe.packing:
        program.log(
            "recipe.packing is on, but this trainer does not pack: TRL keeps packed examples apart only with flash "
            "attention, so batches are padded"
        )
    seed_everything(run.recipe.seed)

    def look(base: Any) -> bool:
        if spec.resume is not None:  # decided when the training began
            return bool(read_config(Path(spec.resume.path) / ADAPTER).get("modules_to_save"))
        return look_at(run, base, chat, data, voice)[1]

    adapted = make_model(run, look)
    try:
        validator = _validator(program, chat, data, adapted, voice)
    except Interrupted:
        return program.result(ResultStatus.INTERRUPTED, detail={"reason": Ending.TERMINATED.value})
    try:
        plan = _plan(spec, data)
        setup = Setup(
            method=run.method,
            recipe=run.recipe,
            adapted=adapted,
            tokenizer=tokenizer,
            pad_id=chat.pad_id,
            items=data.items,
            plan=plan,
            first_step=saved.standing.step if saved else 0,
            folder=program.dir / _SCRATCH,
        )
        best = _best_of(program, saved, plan)
        engine = Engine(setup)
        session = Session(program, Work(adapted, engine.optimizer, data.items, plan, validator), saved, best)
        try:
            if session.begin():
                engine.run(session)
            ending = session.close()
        finally:
            session.shelf.close()
    finally:
        shutil.rmtree(program.dir / _SCRATCH, ignore_errors=True)
    return _result(program, session, ending, inputs, data, str(tokenizer.chat_template))


def _validator(program: Program, chat: ChatFormat, data: Data, adapted: Any, voice: Voice) -> Validator | None:
    """Our own scoring of fixed cases; for dpo against the weights it starts with, so it is made before resuming."""
    spec, run = program.train_spec, program.train_spec.run
    if not data.case_items:
        return None
    tokens = max(1, run.recipe.micro_batch_tokens // spec.micro_batch_divisor)
    packer = Packer(max_tokens=tokens, pad_id=chat.pad_id, is_packing=False)
    reference: dict[str, list[float]] = {}
    if run.method is Method.DPO:

        def go_on(done: int) -> bool:
            voice.progress(done, len(data.case_items), "reference")
            return not voice.is_ending()

        found = answer_log_probs(adapted, data.case_items, packer, go_on)
        if found is None:
            raise Interrupted
        reference = found
    objective = objective_of(run.method, run.recipe, reference, {})
    return Validator(chat, data.case_items, data.case_examples, packer, objective)


def _plan(spec: TrainSpec, data: Data) -> Plan:
    lengths = [num_tokens(item) for item in data.items]
    return Plan(lengths, max(width(item) for item in data.items), spec.run.recipe, spec.micro_batch_divisor)


def _best_of(program: Program, saved: SavedState | None, plan: Plan) -> Path | None:
    """The best adapter of the checkpoint to go on from, which must stand at a place that this data has."""
    resume = program.train_spec.resume
    if saved is None or resume is None:
        return None
    folder, standing = Path(resume.path), saved.standing
    if standing.step > plan.num_steps or plan.place(standing.step) != (saved.epoch, saved.position):
        raise DataError(f"checkpoint {folder.name} stands at a place that this data does not have; start a new run")
    program.log(f"resumed at step {standing.step} of {plan.num_steps}")
    if standing.best_step is None:
        return None
    return folder / (ADAPTER if standing.best_step == standing.step else BEST)


def _result(
    program: Program, session: Session, ending: Ending, inputs: Inputs, data: Data, chat_template: str
) -> Result:
    standing, run = session.standing, program.train_spec.run
    known = {
        "loss": standing.last_loss,
        run.validation.best_metric: standing.best_value,
        f"{LOSS}_before": session.first_loss,
    }
    fields: dict[str, Any] = {
        **asdict(inputs),
        "best_step": standing.best_step,
        "num_steps": standing.step,
        "num_trained_tokens": standing.num_trained_tokens,
        "num_trained_examples": min(standing.num_seen, len(data.items)),
        "num_dropped_examples": len(data.dropped),
        "train_s": session.train_s,
        "metrics": {name: value for name, value in known.items() if value is not None},
        "detail": {"num_tokens": standing.num_tokens, "num_seen": standing.num_seen},
    }
    if ending in (Ending.WALL, Ending.TOKENS):
        fields["detail"]["budget"] = ending.value
    elif ending is not Ending.FINISHED:
        fields["detail"]["reason"] = ending.value
    if ending in INTERRUPTIONS:
        return program.result(ResultStatus.INTERRUPTED, **fields)
    if session.shelf.best_adapter is None:
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
    fields["artifact"] = session.shelf.publish_artifact(chat_template, meta)
    status = ResultStatus.STOPPED if ending is Ending.STOP else ResultStatus.SUCCEEDED
    return program.result(status, **fields)
