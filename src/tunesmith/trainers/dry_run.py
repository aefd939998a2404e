"""The dry run: reads and checks everything that a training would, trains nothing and writes nothing but its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tunesmith.domain.program import Phase, Result, ResultStatus
from tunesmith.domain.task import ErrorClass
from tunesmith.files import read_manifest
from tunesmith.modeling.architecture import read_architecture
from tunesmith.programs.artifact import ADAPTER_WEIGHTS
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.weights import weights_problem
from tunesmith.trainers.inputs import read_inputs

_SPLITS = ("train.parquet", "validation.parquet", "heldout.parquet")


def train(program: Program) -> Result:
    """All that can be known before the first step: files whole, digests as submitted, something to train on."""
    run = program.train_spec.run
    program.phase(Phase.HASH)
    inputs = read_inputs(run)
    program.phase(Phase.LOAD)
    if read_architecture(Path(run.base.path)) != run.base.lock:
        raise ProgramFailure(ErrorClass.MISMATCH, f"the architecture of {run.base.path} is not the one that was locked")
    if run.start is not None:
        problem = weights_problem(Path(run.start.path) / ADAPTER_WEIGHTS)
        if problem is not None:
            raise ProgramFailure(problem.error_class, f"start adapter {run.start.id}: {problem.message}")
    splits = set(read_manifest(Path(run.dataset.path)).files)
    missing = [name for name in _SPLITS if name not in splits]
    if missing:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {run.dataset.id} lacks {', '.join(missing)}")
    if run.dataset.num_train < 1:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {run.dataset.id} has no example to train on")
    counts = {"num_train": float(run.dataset.num_train), "num_validation": float(run.dataset.num_validation)}
    program.progress(1, 1, "check")
    return program.result(ResultStatus.SUCCEEDED, **asdict(inputs), metrics=counts)
