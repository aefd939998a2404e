"""The native trainer: check, load, train, publish. One attempt at one run, from its spec to its result."""

from __future__ import annotations

import os
from pathlib import Path

from tunesmith.core.errors import ConfigError, DataError
from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_tokenizer
from tunesmith.models.tuned import tensors_of
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program
from tunesmith.programs.protocol import Result
from tunesmith.runs.spec import RunSpec
from tunesmith.training.trainers.inputs import read_inputs_whole
from tunesmith.training.trainers.native.controller import StepMetrics, StopReason, TrainingController
from tunesmith.training.trainers.native.distributed import Command, led_group
from tunesmith.training.trainers.native.memory import with_memory
from tunesmith.training.trainers.native.optimizer import learning_rate
from tunesmith.training.trainers.native.outcome import conclude, interrupted_early
from tunesmith.training.trainers.native.preflight import check_before_loading
from tunesmith.training.trainers.native.random_state import repeat_exactly
from tunesmith.training.trainers.native.state import check_restored, read_state, restore
from tunesmith.training.trainers.native.training_setup import (
    Interrupted,
    TrainingSetup,
    build_training,
    rank0_reporter,
    read_data,
)
from tunesmith.training.trainers.native.validation import check_metric


def train(program: Program) -> Result:
    """Entry point, called by `tunesmith.training.trainers.main`."""
    run = program.train_spec.run
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # passes of many sizes leave no gaps
    _refuse_what_it_cannot_do(run)
    repeat_exactly()
    program.phase(Phase.HASH)
    inputs = read_inputs_whole(run)
    program.phase(Phase.LOAD)
    tokenizer = load_tokenizer(Path(run.base.path))
    chat = ChatFormat(tokenizer)
    reporter = rank0_reporter(program)
    data = read_data(run, chat, reporter)
    check_before_loading(program, len(data.items), [item.longest for item in data.items])
    spec = program.train_spec
    saved = read_state(spec.resume, run, run.num_processes) if spec.resume else None
    try:
        with led_group(spec, program.dir) as group:
            setup = build_training(spec, chat, data, group, reporter)
            controller = TrainingController(program, setup.training, saved)
            if spec.resume is not None and saved is not None:
                restore(Path(spec.resume.path), saved, setup.training.adapted, setup.training.optimizer)
            stop_reason = run_steps(program, setup, controller)
    except Interrupted:
        return interrupted_early(program)
    result = conclude(program, controller, stop_reason, inputs, data, str(tokenizer.chat_template), setup.preflight)
    return with_memory(result, setup.memory, program.log)


def _refuse_what_it_cannot_do(run: RunSpec) -> None:
    if run.trainer_options:
        raise ConfigError(
            f"trainer.options: the native trainer has none, found {', '.join(sorted(run.trainer_options))}"
        )
    check_metric(run)


def run_steps(program: Program, setup: TrainingSetup, controller: TrainingController) -> StopReason:
    """Train until something stops it. The state is saved then, unless the training was cancelled."""
    try:
        _check_resumed(program, setup, controller)
        controller.on_train_begin()
        while (stop_reason := controller.stop_reason()) is None:
            _step(setup, controller)
        controller.on_train_end(stop_reason)
    finally:
        controller.checkpoints.close()
    return stop_reason


def _step(setup: TrainingSetup, controller: TrainingController) -> None:
    done = controller.state.step
    setup.training.group.broadcast_command(Command.STEP)
    result = setup.make_step(done)
    if result.nonfinite_reason is not None:
        controller.log(done + 1, result.metrics)
        result.raise_if_nonfinite(done + 1)
    lr, num_trained = result.metrics["lr"], result.num_trained_tokens
    controller.on_step_end(
        StepMetrics(result.loss, lr, result.num_tokens, num_trained, result.num_items, result.metrics)
    )


def _check_resumed(program: Program, setup: TrainingSetup, controller: TrainingController) -> None:
    """Raise if a resumed training has other weights in memory than in the file, or another learning rate."""
    resume, state = program.train_spec.resume, controller.state
    if resume is None:
        return
    check_restored(Path(resume.path), tensors_of(setup.training.adapted))
    rate = learning_rate(program.train_spec.run.recipe, state.step - 1, setup.sampler.num_steps)
    if state.last_lr is not None and rate != state.last_lr:
        raise DataError(
            f"checkpoint {Path(resume.path).name}: the learning rate of step {state.step} was "
            f"{state.last_lr:g} there and is {rate:g} now; start a new run"
        )
