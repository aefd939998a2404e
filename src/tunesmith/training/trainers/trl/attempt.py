"""One attempt at a run by TRL: load, hand over, publish; from the spec to the result."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunesmith.models.adapters import read_config
from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_tokenizer
from tunesmith.models.packs import Packer
from tunesmith.models.scoring import TransformersBackend
from tunesmith.profiles.profile import Method
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program
from tunesmith.programs.protocol import Result
from tunesmith.runs.spec import RunSpec, TrainSpec
from tunesmith.training.rules.memory_plan import UNPLANNED_PACK_TOKENS
from tunesmith.training.trainers.inputs import Inputs
from tunesmith.training.trainers.native.controller import StopReason, Training
from tunesmith.training.trainers.native.distributed import TrainingGroup
from tunesmith.training.trainers.native.objectives import Reference, objective_of
from tunesmith.training.trainers.native.outcome import conclude, interrupted_early
from tunesmith.training.trainers.native.preflight import Preflight, check_before_loading
from tunesmith.training.trainers.native.random_state import seed_everything
from tunesmith.training.trainers.native.state import ADAPTER, read_state
from tunesmith.training.trainers.native.training_setup import (
    Data,
    Interrupted,
    Reporter,
    rank0_reporter,
    read_data,
    reference_log_probs,
    run_preflight,
)
from tunesmith.training.trainers.native.validation import Validator, check_metric
from tunesmith.training.trainers.trl.callbacks import TrlAttempt
from tunesmith.training.trainers.trl.plan import Plan
from tunesmith.training.trainers.trl.rows import num_tokens, width
from tunesmith.training.trainers.trl.trainer import Setup, TrlTrainer

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
    reporter = rank0_reporter(program)
    data = read_data(run, chat, reporter)
    check_before_loading(program, len(data.items), [item.longest for item in data.items])
    if run.recipe.packing:
        program.log(
            "recipe.packing is on, but this trainer does not pack: TRL keeps packed examples apart only with flash "
            "attention, so batches are padded"
        )
    seed_everything(run.recipe.seed)

    found: Preflight | None = None

    def look(base: Any) -> bool:
        nonlocal found
        if spec.resume is not None:  # decided when the training began
            return bool(read_config(Path(spec.resume.path) / ADAPTER).get("modules_to_save"))
        found, train_embeddings = run_preflight(run, base, chat, data, reporter)
        return train_embeddings

    adapted = make_model(run, look)
    try:
        validator = _validator(program, chat, data, adapted, reporter)
    except Interrupted:
        return interrupted_early(program)
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
        trainer = TrlTrainer(setup)
        training = Training(adapted, trainer.optimizer, plan, validator, TrainingGroup())
        attempt = TrlAttempt(program, training, plan, data.items, saved)
        try:
            if attempt.on_train_begin():
                trainer.run(attempt)
            stop_reason = attempt.stop_reason or StopReason.FINISHED
            attempt.controller.on_train_end(stop_reason)
        finally:
            attempt.controller.checkpoints.close()
    finally:
        shutil.rmtree(program.dir / _SCRATCH, ignore_errors=True)
    return conclude(program, attempt.controller, stop_reason, inputs, data, str(tokenizer.chat_template), found)


def _validator(program: Program, chat: ChatFormat, data: Data, adapted: Any, reporter: Reporter) -> Validator | None:
    """Our own scoring of fixed cases; for dpo against the weights it starts with, so it is made before resuming."""
    spec, run = program.train_spec, program.train_spec.run
    if not data.case_items:
        return None
    tokens = max(1, (run.recipe.micro_batch_tokens or UNPLANNED_PACK_TOKENS) // spec.micro_batch_divisor)
    packer = Packer(max_tokens=tokens, pad_id=chat.pad_id, is_packing=False)
    reference: Reference = {}
    if run.method is Method.DPO:
        reference = reference_log_probs(
            TransformersBackend(adapted), packer, TrainingGroup(), reporter, data.case_items
        )
    objective = objective_of(run.method, run.recipe, reference, {})
    return Validator(TransformersBackend(adapted), chat, data.case_items, data.case_examples, packer, objective)


def _plan(spec: TrainSpec, data: Data) -> Plan:
    lengths = [num_tokens(item) for item in data.items]
    return Plan(lengths, max(width(item) for item in data.items), spec.run.recipe, spec.micro_batch_divisor)
