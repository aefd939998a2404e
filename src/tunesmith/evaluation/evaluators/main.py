"""The evaluator program: ``python -m tunesmith.evaluation.evaluators.main --spec SPEC.json --output-dir DIR``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunesmith.core.errors import DataError, TunesmithError
from tunesmith.core.files import json_lines, sha256_file, sha256_text, verify_folder, write_atomic
from tunesmith.evaluation.evaluators import sim
from tunesmith.evaluation.evaluators.base import Case, EvaluatorInfo, SubjectModel
from tunesmith.evaluation.evaluators.progress import CaseProgress, Terminated
from tunesmith.evaluation.evaluators.registry import evaluators_of
from tunesmith.evaluation.evaluators.sheet import Sheet
from tunesmith.profiles.base_model import base_digest
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure, host
from tunesmith.programs.protocol import REFERENCES, Artifact, CaseScore, Result, ResultStatus, Scores
from tunesmith.programs.readings import References
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import EvaluateSpec, Subject

SCORES = "scores.json"


class LoadedModel(SubjectModel, Protocol):
    """What the program needs of a loaded subject beside what its evaluators need."""

    def references(self, cases: Sequence[Case]) -> References | None:
        """What the adapter reads and answers here, to be compared with the target that will serve it."""


class Backend(Protocol):
    """Where subjects are loaded: transformers, or the script of the sim trainer."""

    def case(self, case_id: str, messages: Sequence[Mapping[str, Any]]) -> Case:
        """A case that can be scored; raises TunesmithError with the reason if it cannot."""

    def loaded(self, subject: Subject, progress: CaseProgress) -> AbstractContextManager[LoadedModel]:
        """The subject while the context lasts."""


@dataclass
class _Cases:
    ids: list[str] = field(default_factory=list)
    sound: list[Case] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """By id, why a case cannot be scored under any subject."""


def evaluate(program: Program) -> Result:
    """Score every case under every subject; adapters of the sim trainer by its script, all others by the model."""
    spec = program.evaluate_spec
    evaluators = evaluators_of(spec.evaluation.metrics, spec.evaluation)
    program.phase(Phase.HASH)
    fields = _verified(spec)
    if sim.is_simulated(spec):
        return sim.as_scripted(program, _measured(program, sim.SimBackend(program), evaluators, fields))
    from tunesmith.evaluation.evaluators.model_backend import ModelBackend

    return _measured(program, ModelBackend(program), evaluators, fields)


def _verified(spec: EvaluateSpec) -> dict[str, Any]:
    """Digests of what is really there; the first difference from the spec ends the evaluation."""
    cases = sha256_file(Path(spec.cases.path))
    if cases != spec.cases.digest:
        raise ProgramFailure(ErrorClass.DATA, "the cases changed since the evaluation was planned; evaluate again")
    base = base_digest(Path(spec.base.path))
    if base != spec.base.digest:
        raise ProgramFailure(ErrorClass.MISMATCH, f"the base model in {spec.base.path} changed; lock the profile again")
    digests = {
        subject.label: verify_folder(Path(subject.adapter.path), subject.adapter.digest).digest
        if subject.adapter
        else None
        for subject in spec.subjects
    }
    return {"base_digest": base, "cases_digest": cases, "detail": {"subject_digests": digests}}


def _measured(
    program: Program,
    backend: Backend,
    evaluators: Sequence[tuple[EvaluatorInfo, tuple[str, ...]]],
    fields: dict[str, Any],
) -> Result:
    spec = program.evaluate_spec
    cases = _read_cases(spec, backend)
    num_metrics = sum(len(metrics) for _, metrics in evaluators)
    progress = CaseProgress(program, len(cases.sound) * len(spec.subjects) * num_metrics)
    by_subject: dict[str, tuple[CaseScore, ...]] = {}
    try:
        for subject in spec.subjects:
            with backend.loaded(subject, progress) as model:
                sheet = Sheet(cases.sound)
                for evaluator, metrics in evaluators:
                    with progress.turn(len(cases.sound) * len(metrics)):
                        sheet.measure(evaluator, metrics, model)
                by_subject[subject.label] = sheet.scores(cases.ids, cases.errors)
                if subject.label == "candidate" and subject.adapter is not None:
                    fields["references"] = _write_references(program, model.references(cases.sound))
    except Terminated:
        return program.result(ResultStatus.INTERRUPTED, detail={"reason": "terminated"})
    content = Scores(by_subject=by_subject).model_dump_json()
    write_atomic(program.dir / SCORES, content)
    return program.result(ResultStatus.SUCCEEDED, scores=Artifact(path=SCORES, digest=sha256_text(content)), **fields)


def _read_cases(spec: EvaluateSpec, backend: Backend) -> _Cases:
    cases = _Cases()
    try:
        rows = json_lines(Path(spec.cases.path).read_bytes())
        if len(rows) != spec.cases.num:
            raise ProgramFailure(ErrorClass.DATA, f"{len(rows)} cases instead of {spec.cases.num}; evaluate again")
        for row in rows:
            cases.ids.append(str(row["id"]))
            try:
                cases.sound.append(backend.case(cases.ids[-1], row["messages"]))
            except TunesmithError as error:
                cases.errors[cases.ids[-1]] = error.message
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{spec.cases.path}: not a file of cases ({type(error).__name__}: {error})") from None
    return cases


def _write_references(program: Program, references: References | None) -> Artifact | None:
    if references is None:
        return None
    content = references.model_dump_json()
    write_atomic(program.dir / REFERENCES, content)
    return Artifact(path=REFERENCES, digest=sha256_text(content))


if __name__ == "__main__":
    sys.exit(host(evaluate))
