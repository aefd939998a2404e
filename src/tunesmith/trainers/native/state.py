"""Where a training stands, and the files it can be resumed from: safetensors and JSON, never pickle.

A checkpoint folder holds ``adapter/`` (PEFT format, servable), ``best/`` (the best adapter so far, if that is another),
``state.json`` and ``state.safetensors``; the published manifest vouches for all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from tunesmith.domain.profile import Section
from tunesmith.domain.spec import ResumeSource, RunSpec
from tunesmith.errors import DataError
from tunesmith.files import canonical_json, verify_folder
from tunesmith.modeling.adapters import put_weights
from tunesmith.modeling.tensor_files import write_tensors
from tunesmith.trainers.native.optimizer import optimizer_tensors, put_optimizer_tensors
from tunesmith.trainers.native.random_state import put_random_state, random_json, random_tensors

ADAPTER, BEST = "adapter", "best"
_STATE, _TENSORS = "state.json", "state.safetensors"


class Standing(Section):
    """Everything about a training that is neither a weight nor a random number."""

    step: int = 0
    """Optimizer steps made; also the position in the order of examples."""
    num_tokens: int = 0
    """Tokens that went through the model, padding not counted; what the budget limits."""
    num_trained_tokens: int = 0
    """Those of them that the loss counted."""
    num_seen: int = 0
    """Examples that went through the model, repetitions counted."""
    validated_step: int = -1
    best_step: int | None = None
    best_value: float | None = None
    train_s: float = 0.0
    """Over all attempts."""


class SavedState(Section):
    """state.json"""

    v: Literal[1] = 1
    identity: dict[str, Any]
    standing: Standing
    epoch: int
    position: int
    """Steps made in that epoch; follows from the step, and is checked against it."""
    random: dict[str, Any]
    libraries: dict[str, str] = Field(default_factory=dict)


def identity_of(run: RunSpec) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued, by field."""
    recipe = {f"recipe.{name}": value for name, value in run.recipe.model_dump(mode="json").items()}
    return {
        "run_id": run.run_id,
        "base.digest": run.base.digest,
        "base.context": run.base.context,
        "start.digest": run.start.digest if run.start else None,
        "dataset.fingerprint": run.dataset.fingerprint,
        "validation.max_cases": run.validation.max_cases,
        "validation.best_metric": run.validation.best_metric,
        "validation.best_direction": run.validation.best_direction,
        **recipe,
    }


def write_state(folder: Path, state: SavedState, adapted: Any, optimizer: Any) -> None:
    (folder / _STATE).write_text(canonical_json(state.model_dump(mode="json")))
    write_tensors(folder / _TENSORS, {**optimizer_tensors(adapted, optimizer), **random_tensors()})


def read_state(source: ResumeSource, run: RunSpec) -> SavedState:
    """The state of a checkpoint whose every byte is what its manifest says and that belongs to this very run."""
    folder = Path(source.path)
    verify_folder(folder, source.digest)
    try:
        state = SavedState.model_validate_json((folder / _STATE).read_bytes())
    except (OSError, ValidationError):
        raise DataError(f"checkpoint {folder.name}: {_STATE} is not one of this trainer; start a new run") from None
    expected = json.loads(canonical_json(identity_of(run)))
    for name in sorted(expected.keys() | state.identity.keys()):
        ours, theirs = expected.get(name), state.identity.get(name)
        if ours != theirs:
            raise DataError(
                f"checkpoint {folder.name} belongs to another training: {name} is {_short(ours)} now and was "
                f"{_short(theirs)} there; resume with what it was made with, or start a new run"
            )
    if state.standing.step != source.step:
        raise DataError(f"checkpoint {folder.name} is of step {state.standing.step}, expected step {source.step}")
    return state


def restore(folder: Path, state: SavedState, adapted: Any, optimizer: Any) -> None:
    """Weights, optimizer and random numbers as they were."""
    put_weights(adapted, folder / ADAPTER)
    try:
        tensors = load_file(folder / _TENSORS)
        if state.standing.step > 0:
            put_optimizer_tensors(adapted, optimizer, tensors)
        put_random_state(tensors, state.random)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"checkpoint {folder.name}: its state cannot be restored ({error}); start a new run") from None


def state_of(run: RunSpec, standing: Standing, epoch: int, position: int, libraries: dict[str, str]) -> SavedState:
    return SavedState(
        identity=identity_of(run),
        standing=standing,
        epoch=epoch,
        position=position,
        random=random_json(),
        libraries=libraries,
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
