"""The native trainer: check, load, train, publish. One attempt at one run, from its spec to its result."""

from __future__ import annotations

import os
from pathlib import Path

from tunesmith.core.errors import ConfigError
from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_tokenizer
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program
from tunesmith.programs.messages import Result
from tunesmith.runs.spec import RunSpec
from tunesmith.training.trainers.inputs import read_inputs_whole
from tunesmith.training.trainers.native.controller import Course
from tunesmith.training.trainers.native.distributed import led_team
from tunesmith.training.trainers.native.loop import run_steps
from tunesmith.training.trainers.native.memory import with_memory
from tunesmith.training.trainers.native.outcome import conclude, interrupted_early
from tunesmith.training.trainers.native.preflight import check_before_loading
from tunesmith.training.trainers.native.random_state import repeat_exactly
from tunesmith.training.trainers.native.state import read_state, restore
from tunesmith.training.trainers.native.training_setup import Interrupted, assemble, leading_voice, read_data
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
    voice = leading_voice(program)
    data = read_data(run, chat, voice)
    check_before_loading(program, len(data.items), [item.longest for item in data.items])
    spec = program.train_spec
    saved = read_state(spec.resume, run, run.num_processes) if spec.resume else None
    try:
        with led_team(spec, program.dir) as team:
            work = assemble(spec, chat, data, team, voice)
            course = Course(program, work.training, saved)
            if spec.resume is not None and saved is not None:
                restore(Path(spec.resume.path), saved, work.training.adapted, work.training.optimizer)
            ending = run_steps(program, work, course)
    except Interrupted:
        return interrupted_early(program)
    result = conclude(program, course, ending, inputs, data, str(tokenizer.chat_template), work.preflight)
    return with_memory(result, work.memory, program.log)


def _refuse_what_it_cannot_do(run: RunSpec) -> None:
    if run.trainer_options:
        raise ConfigError(
            f"trainer.options: the native trainer has none, found {', '.join(sorted(run.trainer_options))}"
        )
    check_metric(run)
