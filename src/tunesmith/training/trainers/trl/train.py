"""Entry of the trl trainer: what it refuses and what it was really given, before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.core.errors import ConfigError
from tunesmith.profiles.profile import Method
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import Result
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import RunSpec
from tunesmith.training.trainers.inputs import read_inputs_whole

Look = Callable[[Any], bool]
"""Looks at the bare base before anything is put on it, and says whether its embeddings are to be trained."""
MakeModel = Callable[[RunSpec, Look], Any]
"""The base with the adapter that is trained on it, as peft makes it."""


def train(program: Program) -> Result:
    """Entry point, called by `tunesmith.training.trainers.main`."""
    return train_with(program, _base_with_adapter)


def train_with(program: Program, make_model: MakeModel) -> Result:
    """Train a model by TRL, wherever it comes from; the unsloth trainer brings its own."""
    run = program.train_spec.run
    _prepare_environment()
    _refuse_what_it_cannot_do(run)
    program.phase(Phase.HASH)
    inputs = read_inputs_whole(run)
    try:
        import datasets  # noqa: F401
        import trl  # noqa: F401
    except ImportError as error:
        raise ProgramFailure(
            ErrorClass.CONFIG,
            f"trainer {run.trainer} needs TRL, which is not installed here ({error.name}); install it: "
            "pip install 'tunesmith[trl]'",
        ) from None
    from tunesmith.training.trainers.trl.attempt import run_attempt

    return run_attempt(program, inputs, make_model)


def _prepare_environment() -> None:
    """Read by the libraries when they are imported or when the device is first used."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # one process, one device: with several in sight, transformers would split every batch over all of them
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def _refuse_what_it_cannot_do(run: RunSpec) -> None:
    if run.method not in (Method.SFT, Method.DPO, Method.ORPO):
        raise ConfigError(f"recipe.method: trainer {run.trainer} cannot do {run.method}; use native")
    if run.trainer_options:
        named = ", ".join(sorted(run.trainer_options))
        raise ConfigError(f"trainer.options: trainer {run.trainer} takes none, found {named}")
    if run.method is Method.ORPO and run.recipe.orpo_nll != "conversation":
        raise ConfigError(
            f"recipe.orpo_nll: TRL learns the whole conversation, not only the {run.recipe.orpo_nll}; "
            "set it to conversation, or use trainer native"
        )


def _base_with_adapter(run: RunSpec, look: Look) -> Any:
    from tunesmith.models.loading import load_base, pick_device
    from tunesmith.training.trainers.native.training_setup import adapted_base

    base = load_base(Path(run.base.path), pick_device())
    return adapted_base(run, base, train_embeddings=look(base))
