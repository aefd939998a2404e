"""What a trainer was really given: digests of base, start point and dataset, recomputed from the bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tunesmith.core.files import verify_folder
from tunesmith.datasets.reading import fingerprint_of
from tunesmith.profiles.base_model import base_digest, is_whole_model
from tunesmith.programs.artifact import adapter_problems
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.protocol import Artifact
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef, RunSpec


@dataclass(frozen=True)
class Inputs:
    """Named as the fields of a result that they go into."""

    base_digest: str
    start_digest: str | None
    dataset_fingerprint: str


def read_inputs(run: RunSpec) -> Inputs:
    """Hash everything the run refers to; the first thing that is not what the spec says ends the program."""
    base = base_digest(Path(run.base.path))
    if base != run.base.digest:
        raise ProgramFailure(
            ErrorClass.MISMATCH, f"the base model in {run.base.path} changed since the run was submitted"
        )
    start = _checked(run.start) if run.start else None
    fingerprint = verify_folder(Path(run.dataset.path)).meta.get("fingerprint")
    if fingerprint != run.dataset.fingerprint:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {run.dataset.id} is not what its fingerprint says")
    return Inputs(base, start, str(fingerprint))


def read_inputs_whole(run: RunSpec) -> Inputs:
    """For those that train on the texts: the dataset's fingerprint comes from every text, not from the manifest."""
    inputs = read_inputs(run)
    found = fingerprint_of(Path(run.dataset.path))
    if found != run.dataset.fingerprint:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {run.dataset.id} is not what its fingerprint says")
    return replace(inputs, dataset_fingerprint=found)


def _checked(start: AdapterRef) -> str:
    """An adapter that a training starts from is looked at as strictly as one that is registered; its digest."""
    folder = Path(start.path)
    artifact = Artifact(path=folder.name, digest=start.digest)
    kind: Literal["model", "adapter"] = "model" if is_whole_model(folder) else "adapter"
    for error_class, message in adapter_problems(folder.parent, artifact, None, kind):
        raise ProgramFailure(error_class, f"adapter {start.id} that the run starts from: {message}")
    return start.digest
