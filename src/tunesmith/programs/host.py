"""The program's side of the protocol: what a trainer, evaluator or teacher calls to speak and to end. Nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from tunesmith.core.clock import boot_seconds
from tunesmith.core.disk import is_disk_trouble
from tunesmith.core.errors import (
    ConfigError,
    DataError,
    MissingExtra,
    NotFound,
    ProgramError,
    TunesmithError,
    UsageError,
)
from tunesmith.core.files import json_lines, write_atomic
from tunesmith.profiles.settings import Phase
from tunesmith.programs.event_log import EventWriter
from tunesmith.programs.fingerprint import code_fingerprint, library_versions
from tunesmith.programs.protocol import (
    CHECKPOINTS,
    CONTROL,
    EVENTS,
    EXIT_BAD_CALL,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_KEEPALIVE_LOST,
    EXIT_NO_RESULT,
    EXIT_NO_SPACE,
    EXIT_OK,
    KEEPALIVE,
    KEEPALIVE_SHARE,
    MAX_RESULT,
    MAX_SPEC,
    RESULT,
    STATUS,
    Result,
    ResultStatus,
    SampleOutput,
)
from tunesmith.programs.shim import KeepaliveClock
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import EvaluateSpec, TeachSpec, TrainSpec

__all__ = ["ControlRequest", "Program", "ProgramFailure", "host"]

_SPEC: TypeAdapter[TrainSpec | EvaluateSpec | TeachSpec] = TypeAdapter(
    Annotated[TrainSpec | EvaluateSpec | TeachSpec, Field(discriminator="kind")]
)
_STATUS_INTERVAL_S = 1.0
_EXIT_OF = {
    ResultStatus.SUCCEEDED: EXIT_OK,
    ResultStatus.STOPPED: EXIT_OK,
    ResultStatus.INTERRUPTED: EXIT_INTERRUPTED,
    ResultStatus.FAILED: EXIT_FAILED,
}


@dataclass(frozen=True)
class ControlRequest:
    """A request that the worker passed on; answer it with `Program.ack`."""

    id: str
    kind: RequestKind


class Program:
    """One running trainer or evaluator: its spec, its folder, and its voice."""

    def __init__(self, spec: TrainSpec | EvaluateSpec | TeachSpec, directory: Path) -> None:
        self.spec = spec
        self.dir = directory
        self.terminating = False
        """TERM arrived: write a checkpoint and end as interrupted."""
        self._events = EventWriter(directory / EVENTS)
        self._status: dict[str, Any] = {"v": 1, "attempt_id": spec.attempt.attempt_id, "pid": os.getpid()}
        self._status_at = 0.0
        self._control_offset = 0

    @property
    def train_spec(self) -> TrainSpec:
        if not isinstance(self.spec, TrainSpec):
            raise ProgramFailure(ErrorClass.CONFIG, "a trainer was started with the spec of an evaluator")
        return self.spec

    @property
    def evaluate_spec(self) -> EvaluateSpec:
        if not isinstance(self.spec, EvaluateSpec):
            raise ProgramFailure(ErrorClass.CONFIG, "an evaluator was started with the spec of a trainer")
        return self.spec

    @property
    def teach_spec(self) -> TeachSpec:
        if not isinstance(self.spec, TeachSpec):
            raise ProgramFailure(ErrorClass.CONFIG, "a teacher was started with the spec of another program")
        return self.spec

    def started(self) -> None:
        self._events.write("started", pid=os.getpid(), versions=library_versions())

    def phase(self, phase: Phase, detail: str = "") -> None:
        """What it is busy with now; each phase has its own deadline for progress."""
        self._events.write("phase", phase=phase.value, detail=detail)
        self._mirror(force=True, phase=phase.value, done=0, total=0, unit="")

    def progress(self, done: int, total: int, unit: str = "step") -> None:
        self._events.write("progress", done=done, total=total, unit=unit)
        self._mirror(force=done >= total, done=done, total=total, unit=unit)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Raw values of one step; NaN and infinity are written as they are, because the reader must see them."""
        self._events.write("metrics", step=step, values=_floats(values))

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        is_best: bool,
        samples: Sequence[SampleOutput] = (),
        adapter_norms: Mapping[str, float] | None = None,
    ) -> None:
        self._events.write(
            "validation",
            step=step,
            values=_floats(values),
            is_best=is_best,
            samples=[sample.model_dump() for sample in samples],
            adapter_norms=_floats(adapter_norms or {}),
        )

    def checkpoint(self, step: int, path: Path, digest: str, kinds: Sequence[str]) -> None:
        """Tell that DIR/checkpoints/NAME was published."""
        if path.parent.resolve() != (self.dir / CHECKPOINTS).resolve():
            raise ValueError(f"{path} is not directly below {CHECKPOINTS}/ of the output folder")
        self._events.write("checkpoint", step=step, path=path.name, digest=digest, kinds=list(kinds))

    def log(self, message: str, level: str = "info") -> None:
        self._events.write("log", level=level, message=message)

    def requests(self) -> list[ControlRequest]:
        """Wishes that arrived since the last call."""
        with (self.dir / CONTROL).open("rb") as source:
            source.seek(self._control_offset)
            fresh = source.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._control_offset += len(whole)
        return [ControlRequest(str(each["id"]), RequestKind(each["kind"])) for each in json_lines(whole)]

    def ack(self, request_id: str, detail: str = "") -> None:
        self._events.write("ack", request_id=request_id, detail=detail)

    def result(self, status: ResultStatus, **fields: Any) -> Result:
        """A result of this attempt; fingerprints of config and code are filled in unless given."""
        if isinstance(self.spec, TrainSpec):
            fields.setdefault("config_fingerprint", self.spec.run.fingerprints.config)
            fields.setdefault("code_fingerprint", code_fingerprint())
        ours = {"kind": self.spec.kind, "attempt_id": self.spec.attempt.attempt_id, "token": self.spec.attempt.token}
        return Result(status=status, **{**ours, **fields})

    def finish(self, result: Result) -> bytes:
        """Say `finished` and publish result.json; the bytes to repeat on stdout."""
        data = _encoded(result)
        self._events.write("finished", status=result.status.value)
        self._mirror(force=True, finished=result.status.value)
        write_atomic(self.dir / RESULT, data)
        return data

    def _mirror(self, *, force: bool, **fields: Any) -> None:
        """status.json for other tools: whole at any time, not durable, at most once a second for mere progress."""
        self._status.update(fields)
        now = boot_seconds()
        if not force and now - self._status_at < _STATUS_INTERVAL_S:
            return
        self._status_at = now
        temporary = self.dir / f".{STATUS}.tmp"
        temporary.write_text(json.dumps(self._status))
        os.replace(temporary, self.dir / STATUS)


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    """Plain floats, whatever number type a library used."""
    return {name: float(value) for name, value in values.items()}


def host(main: Callable[[Program], Result], argv: Sequence[str] | None = None) -> int:
    """Run `main` as a program: keepalive, TERM, events, result; returns the exit code. Never raises."""
    stdout = _take_stdout()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the worker asks where it hangs
    try:
        spec_path, directory = _arguments(argv)
        spec = _read_spec(spec_path)
    except (OSError, ValueError) as error:
        _say(f"cannot start: {error}")
        return EXIT_BAD_CALL
    _watch_keepalive(directory / KEEPALIVE, spec.attempt.lease_s)
    program = Program(spec, directory)

    def on_term(_signal: int, _frame: object) -> None:
        program.terminating = True

    signal.signal(signal.SIGTERM, on_term)
    result = _run(main, program)
    try:
        data = program.finish(result)
        _write_all(stdout, data)
    except OSError as error:
        _say(f"the result could not be written: {error}")
        return EXIT_NO_SPACE if is_disk_trouble(error) else EXIT_NO_RESULT
    return _EXIT_OF[result.status]


def _run(main: Callable[[Program], Result], program: Program) -> Result:
    try:
        program.started()
        result = main(program)
        _encoded(result)  # what cannot be told must fail here, where the failure can still be told
        return result
    except BaseException as error:  # a program always ends with a result, whatever happened inside
        with contextlib.suppress(OSError, ValueError):  # the log may be on the full disk, or closed
            traceback.print_exc(file=sys.stderr)
        failure = as_failure(error)
        if failure.error_class is ErrorClass.DISK:  # what was published so far is whole: it can be resumed
            return program.result(ResultStatus.INTERRUPTED, error_class=ErrorClass.DISK, error=failure.message)
        return program.result(ResultStatus.FAILED, error_class=failure.error_class, error=failure.message)


def _encoded(result: Result) -> bytes:
    if not isinstance(result, Result):
        raise TypeError(f"a program returns a Result, not {type(result).__name__}")
    content = result.model_dump(mode="json")
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
    if len(data) > MAX_RESULT:
        raise ValueError(f"the result has {len(data)} bytes, more than {MAX_RESULT}: put long things into files")
    return data


def _take_stdout() -> int:
    """Keep the real stdout for the result; whatever a library prints goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def _arguments(argv: Sequence[str] | None) -> tuple[Path, Path]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    try:
        options = parser.parse_args(argv)
    except (argparse.ArgumentError, SystemExit) as error:
        raise ValueError(f"use --spec SPEC.json --output-dir DIR ({error})") from None
    return options.spec, options.output_dir.resolve()


def _read_spec(path: Path) -> TrainSpec | EvaluateSpec | TeachSpec:
    with path.open("rb") as source:
        data = source.read(MAX_SPEC + 1)
    if len(data) > MAX_SPEC:
        raise ValueError(f"{path} is larger than any spec")
    try:
        return _SPEC.validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{path} is not a spec of version 1: {error}") from None


def _watch_keepalive(path: Path, lease_s: float) -> None:
    """End this process when the worker stops renewing, so that two never train the same run."""
    clock = KeepaliveClock(str(path))
    limit, interval = KEEPALIVE_SHARE * lease_s, min(0.5, lease_s / 20)
    pause = threading.Event()

    def watch() -> None:
        while clock.age_s() < limit:
            pause.wait(interval)
        _say("the worker no longer renews the keepalive: ended")
        os._exit(EXIT_KEEPALIVE_LOST)

    threading.Thread(target=watch, name="keepalive", daemon=True).start()


def _say(message: str) -> None:
    """A line for the log, past any buffer."""
    with contextlib.suppress(OSError):
        os.write(2, message.encode(errors="replace") + b"\n")


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


_MAX_MESSAGE = 2000
_BY_TYPE: tuple[tuple[type[BaseException], ErrorClass], ...] = (
    (DataError, ErrorClass.DATA),
    (ConfigError, ErrorClass.CONFIG),
    (UsageError, ErrorClass.CONFIG),
    (NotFound, ErrorClass.CONFIG),
    (MissingExtra, ErrorClass.MISSING),
    (ProgramError, ErrorClass.PROTOCOL),
    (ImportError, ErrorClass.MISSING),
    (FileNotFoundError, ErrorClass.MISSING),
    (PermissionError, ErrorClass.CONFIG),
    (OSError, ErrorClass.TRANSIENT),
)
_TRAIN_EXTRA = frozenset({"torch", "transformers", "peft", "safetensors", "accelerate", "numpy"})
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


class ProgramFailure(Exception):
    """Raise it to end the program as failed with that class."""

    def __init__(self, error_class: ErrorClass, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message


def as_failure(error: BaseException) -> ProgramFailure:
    """The class and one line for people; the traceback belongs into the log."""
    if isinstance(error, ProgramFailure):
        return ProgramFailure(error.error_class, error.message[:_MAX_MESSAGE])
    if _is_oom(error):
        return ProgramFailure(ErrorClass.OOM, f"out of memory: {_line(error)}")
    if is_disk_trouble(error):
        return ProgramFailure(ErrorClass.DISK, _line(error))
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _TRAIN_EXTRA:
        error = MissingExtra.named("train", "training and scoring")
    for kind, error_class in _BY_TYPE:
        if isinstance(error, kind):
            message = error.message if isinstance(error, TunesmithError) else _line(error)
            return ProgramFailure(error_class, message[:_MAX_MESSAGE])
    return ProgramFailure(ErrorClass.BUG, _line(error))


def _is_oom(error: BaseException) -> bool:
    """By name, because torch must not be imported to know its errors; some builds raise a bare RuntimeError."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OOM_WORDS)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_MESSAGE]
