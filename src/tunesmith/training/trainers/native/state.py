"""Where a training stands, and the files it can be resumed from: safetensors and JSON, never pickle.

A checkpoint folder holds ``adapter/`` (PEFT format, servable), ``best/`` (the best adapter so far, if that is another),
``state.json`` and ``state.safetensors``; the manifest vouches for all of them, and nothing else may be there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from tunesmith.core.errors import DataError
from tunesmith.core.files import MANIFEST, canonical_json, verify_folder
from tunesmith.core.section import Section
from tunesmith.models.adapters import read_config
from tunesmith.models.tuned import put_weights
from tunesmith.profiles.base_model import is_whole_model, weights_path
from tunesmith.programs.fingerprint import library_versions
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.weights import read_header, weights_problem
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import ResumeSource, RunSpec
from tunesmith.training.trainers.native.optimizer import put_optimizer_tensors
from tunesmith.training.trainers.native.random_state import put_random_state

ADAPTER, BEST = "adapter", "best"
STATE, TENSORS = "state.json", "state.safetensors"
_KINDS = frozenset({".json", ".safetensors"})
_MAX_STATE = 16 << 20


class TrainerState(Section):
    """Progress and counters of a training: its state apart from tensors and random number generators."""

    step: int = 0
    """Optimizer steps made; also the position in the order of examples and in the schedule of the learning rate."""
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
    """Wall time over all attempts."""
    last_loss: float | None = None
    """Of the last step; the first one after a resume is compared with it."""
    last_lr: float | None = None
    """Of the last step: what the schedule must give for it again."""


class SavedState(Section):
    """state.json"""

    v: Literal[1] = 1
    identity: dict[str, Any]
    standing: TrainerState
    """Its name in the file; checkpoints of earlier versions have it too."""
    epoch: int
    position: int
    """Steps made in that epoch; follows from the step, and is checked against it."""
    accumulation: Literal[0] = 0
    """Micro-batches made of the next step: always none, because training saves only between optimizer steps."""
    scaler: None = None
    """bf16 and fp32 need no loss scaling, so there is no scaler; the field says so to other readers."""
    random: dict[str, Any]
    """By rank, Python's and numpy's generators; torch's are tensors beside the optimizer's."""
    libraries: dict[str, str] = Field(default_factory=dict)


def identity_of(run: RunSpec, world_size: int = 1) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued, by field."""
    recipe = {f"recipe.{name}": value for name, value in run.recipe.model_dump(mode="json").items()}
    return {
        "run_id": run.run_id,
        "world_size": world_size,
        "base.digest": run.base.digest,
        "base.context": run.base.context,
        "start.digest": run.start.digest if run.start else None,
        "dataset.fingerprint": run.dataset.fingerprint,
        "validation.max_cases": run.validation.max_cases,
        "validation.best_metric": run.validation.best_metric,
        "validation.best_direction": run.validation.best_direction,
        **recipe,
    }


def read_state(source: ResumeSource, run: RunSpec, world_size: int = 1) -> SavedState:
    """The state of a checkpoint whose every byte is what its manifest says and that belongs to this very run."""
    folder = Path(source.path)
    _check_files(folder, source.digest)
    try:
        if (folder / STATE).stat().st_size > _MAX_STATE:
            raise DataError(f"checkpoint {folder.name}: {STATE} is larger than any this trainer writes")
        state = SavedState.model_validate_json((folder / STATE).read_bytes())
    except (OSError, ValidationError):
        raise DataError(f"checkpoint {folder.name}: {STATE} is not one of this trainer; start a new run") from None
    expected = json.loads(canonical_json(identity_of(run, world_size)))
    for name in sorted(expected.keys() | state.identity.keys()):
        ours, theirs = expected.get(name), state.identity.get(name)
        if ours != theirs:
            raise DataError(
                f"checkpoint {folder.name} belongs to another training: {_short(name)} is {_short(ours)} now and was "
                f"{_short(theirs)} there; resume with what it was made with, or start a new run"
            )
    if state.standing.step != source.step:
        raise DataError(f"checkpoint {folder.name} is of step {state.standing.step}, expected step {source.step}")
    return state


def restore(folder: Path, state: SavedState, adapted: Any, optimizer: Any, rank: int = 0) -> None:
    """Weights, optimizer and random numbers as they were in a checkpoint that `read_state` found good."""
    put_weights(adapted, folder / ADAPTER)
    try:
        tensors = load_file(folder / TENSORS)
        _check_optimizer_state(tensors, state.standing.step)
        if state.standing.step > 0:
            put_optimizer_tensors(adapted, optimizer, tensors)
        put_random_state(tensors, state.random, rank)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"checkpoint {folder.name}: its state cannot be restored ({_short(error, 200)}); start a new run"
        ) from None


def check_restored(folder: Path, weights: dict[str, Any]) -> None:
    """The adapter in memory is the one of the file, to the bit: a fresh one wrapped over it would train from zero."""
    saved = load_file(weights_path(folder / ADAPTER))
    odd = [name for name in sorted(saved.keys() | weights.keys()) if not _same_bits(saved.get(name), weights.get(name))]
    if odd:
        raise ProgramFailure(
            ErrorClass.BUG, f"checkpoint {folder.name}: {odd[0]} is not in memory what it is in the file after loading"
        )


def state_of(
    run: RunSpec, state: TrainerState, epoch: int, position: int, random: dict[str, Any], world_size: int = 1
) -> SavedState:
    """Return the content of state.json; `random` is what `TrainingGroup.random_state` returns."""
    return SavedState(
        identity=identity_of(run, world_size),
        standing=state,
        epoch=epoch,
        position=position,
        random=random,
        libraries=library_versions(),
    )


def _check_files(folder: Path, digest: str) -> None:
    """What lies there is what was published, of the kinds this trainer writes, and every tensor file adds up."""
    try:
        listed = verify_folder(folder, digest).files
    except DataError as error:
        # it was complete when the worker chose it: another attempt falls back to the one before
        raise ProgramFailure(
            ErrorClass.TRANSIENT,
            f"checkpoint {folder.name} is damaged: {error.message}; the next attempt resumes from an earlier one",
        ) from None
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or (not path.is_dir() and name not in listed and name != MANIFEST):
            raise DataError(f"checkpoint {folder.name}: {_short(name)} does not belong there; remove it")
    for name in listed:
        if Path(name).suffix not in _KINDS:
            raise DataError(
                f"checkpoint {folder.name}: refused because of {_short(name)}: a checkpoint holds JSON and safetensors"
                " only, because other formats can run code; start a new run"
            )
        if name.endswith(".safetensors"):
            read_header(folder / name)
    for part in (ADAPTER, BEST) if (folder / BEST).exists() else (ADAPTER,):
        if not is_whole_model(folder / part):
            read_config(folder / part)
        problem = weights_problem(weights_path(folder / part))
        if problem is not None:
            raise ProgramFailure(problem.error_class, f"checkpoint {folder.name}: {part}/{problem.message}")


def _check_optimizer_state(tensors: dict[str, Any], step: int) -> None:
    """Raise ValueError unless the optimizer's state is finite and at this step."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinity")
        if name.startswith("step/") and (tensor.numel() != 1 or float(tensor) != step):
            raise ValueError(f"{name} is not at step {step}")


def _same_bits(one: Any, other: Any) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(one, other))


def _short(value: object, most: int = 40) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most // 3]}…"
