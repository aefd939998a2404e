"""The command evaluator: a program of the user's scores the answers; JSON lines in, JSON lines out.

`evaluation.command` of a profile is a list and never a shell line. The program is started in the workspace, once for
each side, and is not told which side it is. It reads one line per case:
``{"id", "messages", "reference", "answer", "finished"}``, and writes one line per case, in any order:
``{"id", "scores": {NAME: number, …}}`` with every name of `evaluation.command_metrics`, or ``{"id", "error": text}``.
Anything else (another exit code, a line too many or too few, a score that is not a number, too slow, too much) ends the
evaluation as failed. The files that the command names are sealed into the run spec by their sha256.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tunesmith.core import strict_json
from tunesmith.core.errors import quoted
from tunesmith.evaluation.evaluators.base import Answer, Case, CaseScore, EvaluatorInfo, Metric, SubjectModel
from tunesmith.profiles.sections.evaluation import COMMAND_METRIC, EvaluationSettings
from tunesmith.programs import user_command
from tunesmith.programs.host import ProgramFailure
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import ScoringCommand

NAME = "command"
SETTING = "evaluation.command"
_POLL_S = 0.02
_MAX_OUTPUT = 1 << 20  # and beside it, for each case:
_MAX_PER_CASE = 16 << 10
_MAX_SHOWN = 300


def evaluator_of_command(settings: EvaluationSettings) -> EvaluatorInfo:
    """The evaluator with the metrics that a profile says its program measures."""
    return EvaluatorInfo(
        name=NAME,
        description="answers scored by a program of yours",
        metrics=tuple(
            Metric(f"{COMMAND_METRIC}{name}", better, f"{name}, as evaluation.command scores the greedy answers")
            for name, better in settings.command_metrics.items()
        ),
        measure=measure,
    )


def command_in(root: Path, command: Sequence[str]) -> ScoringCommand | None:
    """The command as it is started, with the sha256 of each file it names; ConfigError if it cannot be started."""
    if not command:
        return None
    return ScoringCommand(
        argv=user_command.argv_in(root, command, setting=SETTING, example="scripts/score.py"),
        root=str(root),
        sha256=user_command.sealed_files(root, command),
    )


def measure(model: SubjectModel, cases: Sequence[Case], metrics: Sequence[str]) -> Iterable[CaseScore]:
    command, settings = model.spec.command, model.spec.evaluation
    if command is None:
        raise ProgramFailure(ErrorClass.CONFIG, "the spec names no program that scores")
    answers = model.answers(cases)
    lines = [_line(case, answer) for case, answer in zip(cases, answers, strict=True)]
    said = _read(_output_of(command, lines, settings.command_timeout_s), cases, settings.command_metrics)
    for case, answer in zip(cases, answers, strict=True):
        found = said[case.id]
        values = {} if isinstance(found, str) else {name: found[name.removeprefix(COMMAND_METRIC)] for name in metrics}
        error = found if isinstance(found, str) else None
        yield CaseScore(case_id=case.id, values=values, answers=dict.fromkeys(metrics, answer.text), error=error)


def _line(case: Case, answer: Answer) -> str:
    row = {
        "id": case.id,
        "messages": [dict(message) for message in case.messages[:-1]],
        "reference": case.reference,
        "answer": answer.text,
        "finished": answer.finished,
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def _output_of(command: ScoringCommand, lines: Iterable[str], timeout_s: float) -> bytes:
    """What the program wrote; raises ProgramFailure if it failed, was too slow or wrote too much."""
    program = sys.executable if command.argv[0] == user_command.PYTHON else command.argv[0]
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        num = 0
        for num, line in enumerate(lines, start=1):  # noqa: B007 - their number is used below
            stdin.write(line.encode("utf-8", errors="replace"))
        stdin.seek(0)
        limit = _MAX_OUTPUT + num * _MAX_PER_CASE
        try:
            process = subprocess.Popen(
                [program, *command.argv[1:]], stdin=stdin, stdout=out, stderr=errors, cwd=command.root,
                env=dict(os.environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ProgramFailure(ErrorClass.MISSING, f"it cannot be started: {error.strerror}") from None
        code = _wait(process, (out, errors), limit, timeout_s)
        if code != 0:
            raise ProgramFailure(ErrorClass.BUG, f"it ended with {code}: {_last_line(errors)}")
        out.seek(0)
        return out.read(limit + 1)


def _wait(process: subprocess.Popen[bytes], streams: Sequence[IO[bytes]], limit: int, timeout_s: float) -> int:
    """Its exit code. It has a session of its own, so that all of it ends when it is too slow or too loud."""
    deadline = time.monotonic() + timeout_s
    too_slow = False
    try:
        while process.poll() is None and not too_slow and _largest(streams) <= limit:
            too_slow = time.monotonic() > deadline
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind, too
        process.wait()
    if too_slow:
        setting = "evaluation.command_timeout_s"
        raise ProgramFailure(ErrorClass.STALLED, f"it did not end within {timeout_s:g} s ({setting})")
    if _largest(streams) > limit:
        raise ProgramFailure(ErrorClass.PROTOCOL, f"it wrote more than {limit >> 20} MiB")
    return process.returncode


def _largest(streams: Sequence[IO[bytes]]) -> int:
    return max(os.fstat(stream.fileno()).st_size for stream in streams)


def _read(output: bytes, cases: Sequence[Case], names: Iterable[str]) -> dict[str, dict[str, float] | str]:
    """By case, its scores or why it has none; raises ProgramFailure at the first thing that is not as agreed."""
    wanted, found = set(names), dict[str, dict[str, float] | str]()
    known = {case.id for case in cases}
    for number, row in _rows(output):
        where = f"line {number} of its output"
        case_id = row.get("id")
        if not isinstance(case_id, str) or case_id not in known:
            raise _odd(f"{where} names a case that was not asked for")
        if case_id in found:
            raise _odd(f"{where} scores case {quoted(case_id)} a second time")
        match row:
            case {"error": str() as error, **rest} if set(rest) == {"id"} and error.strip():
                found[case_id] = f"{NAME}: {_plain(error)}"
            case {"scores": dict() as scores, **rest} if set(rest) == {"id"}:
                found[case_id] = _scores(scores, wanted, where)
            case _:
                raise _odd(f"{where} has not exactly id and scores, or id and error")
    missing = [case.id for case in cases if case.id not in found]
    if missing:
        raise _odd(f"it scored {len(found)} of {len(cases)} cases; the first without a score is {quoted(missing[0])}")
    return found


def _rows(output: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(output.splitlines(), start=1):
        try:
            row = strict_json.loads(line, lambda key: ValueError(f"key {key} twice"), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise _odd(f"line {number} of its output is no JSON") from None
        if not isinstance(row, dict):
            raise _odd(f"line {number} of its output is no JSON object")
        yield number, row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _scores(scores: Mapping[str, Any], wanted: set[str], where: str) -> dict[str, float]:
    if set(scores) != wanted:
        raise _odd(f"{where} has not exactly the scores {', '.join(sorted(wanted))} (evaluation.command_metrics)")
    numbers = {}
    for name, value in scores.items():
        if not _is_finite(value):
            raise _odd(f"{where}: {name} is not a finite number")
        numbers[name] = float(value)
    return numbers


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _odd(what: str) -> ProgramFailure:
    return ProgramFailure(ErrorClass.PROTOCOL, what)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _MAX_PER_CASE))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return _plain((lines or ["it said nothing"])[-1])


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:_MAX_SHOWN]
