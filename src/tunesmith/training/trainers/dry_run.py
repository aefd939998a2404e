"""The dry run: reads and checks everything that a training would, trains nothing and writes nothing but its report.

A worker runs it as a trainer, on its own machine. ``python -m tunesmith.training.trainers.dry_run < SPEC.json`` is the
same without a worker: `run submit --dry-run` starts it, because only a child process may load what counts tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.core.errors import TunesmithError
from tunesmith.datasets.reading import summary, verify
from tunesmith.datasets.report import Split
from tunesmith.profiles.architecture import read_architecture
from tunesmith.profiles.base_model import weights_path
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import Result, ResultStatus
from tunesmith.programs.weights import weights_problem
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import DatasetRef, RunSpec
from tunesmith.training.trainers.inputs import Inputs, read_inputs
from tunesmith.training.trainers.registry import DRY_RUN_OF as TRAINER

_OURS = frozenset({"native", "trl", "unsloth"})
"""Trainers that count tokens as ours does, and drop what is too long."""

Told = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Looked:
    inputs: Inputs
    counts: dict[str, float]
    warnings: tuple[str, ...]
    """What a training would warn about, its lengths first."""


def train(program: Program) -> Result:
    """All that can be known before the first step: files whole, digests as submitted, something to train on."""
    run = program.train_spec.run
    program.phase(Phase.HASH)
    found = look(run, program.progress)
    program.phase(Phase.LOAD)
    for warning in found.warnings:
        program.log(warning, "warning")
    program.progress(1, 1, "check")
    return program.result(ResultStatus.SUCCEEDED, **asdict(found.inputs), metrics=found.counts)


def look(run: RunSpec, told: Told) -> Looked:
    """Everything; raises what a training would fail with."""
    inputs = read_inputs(run)
    if read_architecture(Path(run.base.path)) != run.base.lock:
        raise ProgramFailure(ErrorClass.MISMATCH, f"the architecture of {run.base.path} is not the one that was locked")
    if run.start is not None:
        problem = weights_problem(weights_path(Path(run.start.path)))
        if problem is not None:
            raise ProgramFailure(problem.error_class, f"start adapter {run.start.id}: {problem.message}")
    counts = _read_dataset(run.dataset)
    return Looked(inputs, counts, _lengths(run, told))


def _read_dataset(dataset: DatasetRef) -> dict[str, float]:
    """Every example is read once, as a training would; what is counted must be what the spec says."""
    verify(Path(dataset.path), dataset.fingerprint)
    counts = summary(Path(dataset.path)).counts
    found = (counts.get(Split.TRAIN, 0), counts.get(Split.VALIDATION, 0))
    if found != (dataset.num_train, dataset.num_validation):
        raise ProgramFailure(
            ErrorClass.DATA,
            f"dataset {dataset.id} has {found[0]} examples to train and {found[1]} to validate on, "
            f"not {dataset.num_train} and {dataset.num_validation}",
        )
    if found[0] < 1:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {dataset.id} has no example to train on; prepare a larger one")
    return {"num_train": float(found[0]), "num_validation": float(found[1])}


def _lengths(run: RunSpec, told: Told) -> tuple[str, ...]:
    """What the training would say about the lengths of its examples; raises where none fits, as the training does."""
    trainer = str(run.trainer_options.get(TRAINER, run.trainer))
    if trainer not in _OURS:
        return (f"lengths were not looked at: trainer {trainer} has rules of its own",)
    from tunesmith.models.chat import ChatFormat
    from tunesmith.models.loading import load_tokenizer
    from tunesmith.training.trainers.native.training_setup import data_reporter, read_data

    warnings: list[str] = []
    chat = ChatFormat(load_tokenizer(Path(run.base.path)))
    read_data(run, chat, data_reporter(lambda text, _: warnings.append(text), told))
    return tuple(warnings)


def _main() -> int:
    """Read a run's spec from stdin; write what was found, or what is wrong, to stdout."""
    run = RunSpec.model_validate_json(sys.stdin.buffer.read())
    try:
        found = look(run, lambda done, total, unit: None)
    except (TunesmithError, ProgramFailure, OSError) as error:
        answer: dict[str, object] = {"problem": getattr(error, "message", str(error))}
    else:
        answer = {"problem": None, "warnings": found.warnings}
    sys.stdout.write(f"{json.dumps(answer)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
