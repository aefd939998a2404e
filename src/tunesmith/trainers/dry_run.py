"""The dry run: reads and checks everything that a training would, trains nothing and writes nothing but its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tunesmith.data.dataset import summary, verify
from tunesmith.domain.dataset import Split
from tunesmith.domain.program import Phase, Result, ResultStatus
from tunesmith.domain.spec import DatasetRef
from tunesmith.domain.task import ErrorClass
from tunesmith.modeling.architecture import read_architecture
from tunesmith.modeling.base_files import weights_path
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.weights import weights_problem
from tunesmith.trainers.inputs import read_inputs


def train(program: Program) -> Result:
    """All that can be known before the first step: files whole, digests as submitted, something to train on."""
    run = program.train_spec.run
    program.phase(Phase.HASH)
    inputs = read_inputs(run)
    if read_architecture(Path(run.base.path)) != run.base.lock:
        raise ProgramFailure(ErrorClass.MISMATCH, f"the architecture of {run.base.path} is not the one that was locked")
    if run.start is not None:
        problem = weights_problem(weights_path(Path(run.start.path)))
        if problem is not None:
            raise ProgramFailure(problem.error_class, f"start adapter {run.start.id}: {problem.message}")
    program.phase(Phase.LOAD)
    counts = _read_dataset(run.dataset)
    program.progress(1, 1, "check")
    return program.result(ResultStatus.SUCCEEDED, **asdict(inputs), metrics=counts)


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
