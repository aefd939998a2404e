"""Checks a finished program: its files against its spec, listing all mismatches. Fails closed and never raises."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tunesmith.core.errors import ProgramError, TunesmithError
from tunesmith.core.files import json_lines
from tunesmith.programs.adapter_fit import Base
from tunesmith.programs.artifact import adapter_problems, inside, read_capped
from tunesmith.programs.event_log import EventReader
from tunesmith.programs.protocol import (
    EVENTS,
    EXIT_BAD_CALL,
    EXIT_INTERRUPTED,
    EXIT_KEEPALIVE_LOST,
    EXIT_NO_RESULT,
    EXIT_NO_SPACE,
    MAX_COUNT,
    MAX_RESULT,
    MAX_STDOUT,
    REFERENCES,
    RESULT,
    STDOUT,
    Metrics,
    Result,
    ResultStatus,
    Scores,
)
from tunesmith.programs.readings import References
from tunesmith.programs.shim import CANNOT_START_EXIT
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import EvaluateSpec, TrainSpec

_MAX_SCORES = 256 << 20
_MAX_REFERENCES = 16 << 20
_MAX_MESSAGE = 4000
_PRECEDENCE = (ErrorClass.PROTOCOL, ErrorClass.NONFINITE, ErrorClass.MISMATCH)
_WITHOUT_RESULT = {
    0: (ErrorClass.PROTOCOL, "it exited 0 without a result"),
    EXIT_BAD_CALL: (ErrorClass.CONFIG, "it could not read its spec"),
    EXIT_NO_RESULT: (ErrorClass.TRANSIENT, "it could not write its result"),
    EXIT_NO_SPACE: (ErrorClass.DISK, "the disk had no room for its result"),
    CANNOT_START_EXIT: (ErrorClass.MISSING, "its command could not be started"),
}

Problem = tuple[ErrorClass, str]


@dataclass(frozen=True)
class CheckedResult:
    """The outcome of an attempt, its error, and its result if that passed every check."""

    outcome: AttemptState
    error_class: ErrorClass | None
    error: str | None
    result: Result | None


def check_train_result(spec: TrainSpec, directory: Path, exit_code: int) -> CheckedResult:
    """Check the result of a trainer that nobody killed."""
    return _check_result(spec, directory, exit_code, lambda result: _train_problems(spec, directory, result))


def check_evaluate_result(spec: EvaluateSpec, directory: Path, exit_code: int) -> CheckedResult:
    """Check an evaluator's result. A missing, failed or NaN score is not an error here: the gate decides on it."""
    return _check_result(spec, directory, exit_code, lambda result: _evaluate_problems(spec, directory, result))


def read_scores(directory: Path, result: Result) -> Scores:
    """Read the scores of an evaluator whose result was checked."""
    if result.scores is None:
        raise ProgramError("the result names no scores")
    path = inside(directory, result.scores.path)
    data = read_capped(path, _MAX_SCORES, result.scores.digest)
    try:
        return Scores.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise ProgramError(f"the scores are malformed: {_first(error)}") from None


def read_references(directory: Path, digest: str) -> References:
    """Read the parity references of an evaluator whose result was checked."""
    data = read_capped(directory / REFERENCES, _MAX_REFERENCES, digest)
    try:
        return References.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise ProgramError(f"the references are malformed: {_first(error)}") from None


def _check_result(
    spec: TrainSpec | EvaluateSpec,
    directory: Path,
    exit_code: int,
    problems_of_success: Callable[[Result], list[Problem]],
) -> CheckedResult:
    if (by_exit_code := _by_exit_code(exit_code)) is not None:
        return by_exit_code
    try:
        if not (directory / RESULT).exists():
            fallback = (ErrorClass.CRASH, f"it exited {exit_code} without a result")
            return _failed([_WITHOUT_RESULT.get(exit_code, fallback)])
        result = _read_result(directory)
        problems = _identity_problems(spec, result) + _exit_problems(result, exit_code)
        problems += _stream_problems(directory, result)
        if result.status in (ResultStatus.SUCCEEDED, ResultStatus.STOPPED):
            problems += problems_of_success(result)
    except TunesmithError as error:
        return _failed([(ErrorClass.PROTOCOL, error.message)])
    except Exception as error:  # whatever a program left in its folder must not take the worker down
        return _failed([(ErrorClass.PROTOCOL, f"its files cannot be checked ({type(error).__name__}: {error})")])
    return _failed(problems) if problems else _accepted(result)


def _by_exit_code(exit_code: int) -> CheckedResult | None:
    """Return the outcome if the exit code alone decides it, whatever files there are; else None."""
    if exit_code == -signal.SIGTERM:
        return CheckedResult(AttemptState.INTERRUPTED, None, "TERM ended it before it could save anything more", None)
    if exit_code < 0:
        return _failed([(ErrorClass.CRASH, _about_signal(-exit_code))])
    if exit_code == EXIT_KEEPALIVE_LOST:
        return CheckedResult(AttemptState.LOST, None, "the keepalive was not renewed in time, so it ended itself", None)
    return _failed([_WITHOUT_RESULT[exit_code]]) if exit_code == EXIT_NO_SPACE else None


def _accepted(result: Result) -> CheckedResult:
    match result.status:
        case ResultStatus.SUCCEEDED | ResultStatus.STOPPED:  # stopped on request, with the best so far: goes on as well
            return CheckedResult(AttemptState.SUCCEEDED, None, None, result)
        case ResultStatus.INTERRUPTED:
            disk = ErrorClass.DISK if result.error_class is ErrorClass.DISK else None
            return CheckedResult(AttemptState.INTERRUPTED, disk, _plain(result.error), result)
        case ResultStatus.FAILED:
            error = _plain(result.error) or "it failed and did not say why"
            return CheckedResult(AttemptState.FAILED, result.error_class or ErrorClass.BUG, error, result)


def _failed(problems: list[Problem]) -> CheckedResult:
    classes = [error_class for error_class, _ in problems]
    worst = next((error_class for error_class in _PRECEDENCE if error_class in classes), classes[0])
    message = "; ".join(dict.fromkeys(text for _, text in problems))
    return CheckedResult(AttemptState.FAILED, worst, _plain(message), None)


def _about_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = "; the system may have run out of memory and chosen it" if number == signal.SIGKILL else ""
    return f"it was ended by {name}{hint}"


def _read_result(directory: Path) -> Result:
    data = read_capped(directory / RESULT, MAX_RESULT)
    printed = read_capped(directory / STDOUT, MAX_STDOUT)
    try:
        result = Result.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise ProgramError(f"{RESULT} is malformed: {_first(error)}") from None
    if data.strip() != printed.strip() and _parsed(data) != _parsed(printed):
        raise ProgramError(f"stdout does not carry the same JSON as {RESULT}")
    return result


def _parsed(data: bytes) -> object:
    """As a value in which NaN equals itself; each unreadable text equals nothing."""
    try:
        return json.loads(data, parse_constant=str)
    except (ValueError, RecursionError):
        return object()


def _identity_problems(spec: TrainSpec | EvaluateSpec, result: Result) -> list[Problem]:
    problems = []
    if result.kind != spec.kind:
        problems.append(_mismatch("kind", spec.kind, result.kind))
    if result.attempt_id != spec.attempt.attempt_id:
        problems.append(_mismatch("attempt_id", spec.attempt.attempt_id, result.attempt_id))
    if result.token != spec.attempt.token:
        problems.append((ErrorClass.MISMATCH, "token: not the token of this attempt"))
    return problems


def _exit_problems(result: Result, exit_code: int) -> list[Problem]:
    expected = {ResultStatus.INTERRUPTED: EXIT_INTERRUPTED, ResultStatus.FAILED: None}.get(result.status, 0)
    fits = exit_code == expected if expected is not None else exit_code not in (0, EXIT_INTERRUPTED)
    if fits:
        return []
    return [(ErrorClass.PROTOCOL, f"it says {result.status.value} but exited {exit_code}")]


def _stream_problems(directory: Path, result: Result) -> list[Problem]:
    """The whole event log once more: nothing that came after the worker's last look goes unread."""
    reader, last = EventReader(directory / EVENTS), None
    try:
        while events := reader.read():
            last = next((event for event in reversed(events) if isinstance(event, Metrics)), last)
    except ProgramError as error:
        return [(ErrorClass.PROTOCOL, error.message)]
    problems: list[Problem] = []
    if reader.has_half_line:
        problems.append((ErrorClass.PROTOCOL, "its events end in half a line"))
    if result.status in (ResultStatus.FAILED, ResultStatus.INTERRUPTED):
        return problems
    if last is not None and not math.isfinite(last.values.get("loss", 0.0)):
        problems.append((ErrorClass.NONFINITE, f"the loss of its last step ({last.step}) is not a finite number"))
    return problems


def _train_problems(spec: TrainSpec, directory: Path, result: Result) -> list[Problem]:
    run = spec.run
    expected = {
        "base_digest": run.base.digest,
        "start_digest": run.start.digest if run.start else None,
        "dataset_fingerprint": run.dataset.fingerprint,
        "config_fingerprint": run.fingerprints.config,
        "code_fingerprint": run.fingerprints.code,
    }
    problems = _field_problems(expected, result) + _count_problems(result)
    problems += [
        (ErrorClass.NONFINITE, f"metrics.{name}: not a finite number")
        for name, value in result.metrics.items()
        if not math.isfinite(value)
    ]
    if run.expected_artifact == "none":
        if result.artifact is not None:
            problems.append((ErrorClass.MISMATCH, "artifact: none was asked for"))
        return problems
    if result.num_trained_tokens <= 0:
        problems.append((ErrorClass.MISMATCH, "num_trained_tokens: not a single token was trained"))
    if result.num_steps <= 0:
        problems.append((ErrorClass.MISMATCH, "num_steps: not a single step was made"))
    base = Base.of(Path(run.base.path), run.recipe)
    return problems + adapter_problems(directory, result.artifact, run.start, run.expected_artifact, base)


def _evaluate_problems(spec: EvaluateSpec, directory: Path, result: Result) -> list[Problem]:
    expected = {"base_digest": spec.base.digest, "cases_digest": spec.cases.digest}
    problems = _field_problems(expected, result) + _count_problems(result)
    digests = {subject.label: subject.adapter.digest if subject.adapter else None for subject in spec.subjects}
    if result.detail.get("subject_digests") != digests:
        problems.append((ErrorClass.MISMATCH, "subject_digests: it did not score the adapters it was given"))
    try:
        scores = read_scores(directory, result)
        case_ids = _case_ids(spec)
    except TunesmithError as error:
        return [*problems, (ErrorClass.PROTOCOL, error.message)]
    if set(scores.by_subject) != set(digests):
        problems.append(_mismatch("subjects", sorted(digests), sorted(scores.by_subject)))
    for label, by_case in scores.by_subject.items():
        if [score.case_id for score in by_case] != case_ids:
            text = (
                f"scores of {label[:40]}: {len(by_case)} cases, not the {len(case_ids)} that were asked, in their order"
            )
            problems.append((ErrorClass.MISMATCH, text))
    return problems + _reference_problems(spec, directory, result)


def _reference_problems(spec: EvaluateSpec, directory: Path, result: Result) -> list[Problem]:
    """An evaluator may leave them out; what it leaves must be about the candidate."""
    if result.references is None:
        return []
    if result.references.path != REFERENCES:
        return [_mismatch("references.path", REFERENCES, result.references.path)]
    try:
        found = read_references(directory, result.references.digest)
    except ProgramError as error:
        return [(ErrorClass.PROTOCOL, error.message)]
    candidate = next((subject.adapter for subject in spec.subjects if subject.label == "candidate"), None)
    about = {"references.adapter": (candidate and candidate.digest, found.adapter)}
    about["references.base"] = (spec.base.digest, found.base)
    return [_mismatch(name, wanted, told) for name, (wanted, told) in about.items() if wanted != told]


def _case_ids(spec: EvaluateSpec) -> list[str]:
    data = read_capped(Path(spec.cases.path), _MAX_SCORES, spec.cases.digest)
    try:
        return [case["id"] for case in json_lines(data)]
    except (ValueError, KeyError, TypeError):
        raise ProgramError(f"{spec.cases.path} is not a file of cases") from None


def _field_problems(expected: Mapping[str, str | None], result: Result) -> list[Problem]:
    return [
        _mismatch(name, wanted, getattr(result, name))
        for name, wanted in expected.items()
        if getattr(result, name) != wanted
    ]


def _count_problems(result: Result) -> list[Problem]:
    counts = ("num_steps", "num_trained_tokens", "num_trained_examples", "num_dropped_examples", "best_step")
    values = {name: getattr(result, name) or 0 for name in counts} | {"train_s": result.train_s}
    return [
        (ErrorClass.MISMATCH, f"{name}: out of range")
        for name, value in values.items()
        if not 0 <= value <= MAX_COUNT  # NaN is not in any range either
    ]


def _mismatch(name: str, expected: object, found: object) -> Problem:
    return ErrorClass.MISMATCH, f"{name}: expected {_short(expected)}, got {_short(found)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part)[:40] for part in first["loc"][:6])
    return f"{place}: {first['msg']}"[:300]


def _plain(text: str | None) -> str | None:
    """As it may be shown and stored: one line, no control characters, cut."""
    if text is None:
        return None
    line = "".join(char if char.isprintable() else " " for char in text[: 2 * _MAX_MESSAGE])
    return " ".join(line.split())[:_MAX_MESSAGE] or None
