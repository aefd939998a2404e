"""Start a program in its own folder, below its shim, and hold the worker's end of it: events, requests, keepalive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

from tunesmith.core.clock import boot_seconds
from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ProgramError
from tunesmith.core.files import open_plain, write_atomic
from tunesmith.programs import shim
from tunesmith.programs.event_log import EventReader
from tunesmith.programs.process_identity import MARKER, ProcessIdentity, identify, kill_below
from tunesmith.programs.protocol import (
    CAPS,
    CONTROL,
    EVENTS,
    KEEPALIVE,
    RESULT,
    SPEC,
    STDERR,
    STDOUT,
    Event,
)
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.spec import EvaluateSpec, TeachSpec, TrainSpec

_SHIM_PATIENCE_S = 10.0
_OWN = 0o600  # the spec and the result hold the token of the attempt, the log what people said


@dataclass(frozen=True)
class _Pipes:
    """The worker's ends: commands to the shim (whose closing tells that the worker died), and its reports.

    The two files are held open, so that nothing the program puts in their place can trap or mislead the worker.
    """

    lifeline: int
    status: int
    control: int
    keepalive: int


def launch(
    argv: Sequence[str],
    spec: TrainSpec | EvaluateSpec | TeachSpec,
    directory: Path,
    *,
    env: Mapping[str, str] | None = None,
) -> RunningProgram:
    """Start ``argv --spec DIR/spec.json --output-dir DIR`` below a shim; the folder must be this attempt's own.

    `env` is all that it sees of the environment; without it, what every program may see.
    """
    directory = directory.absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any((directory / name).exists() for name in (SPEC, EVENTS, RESULT)):
        raise ProgramError(f"{directory} was used by another attempt: every attempt needs a folder of its own")
    write_atomic(directory / SPEC, spec.model_dump_json(), mode=_OWN)
    control = os.open(directory / CONTROL, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, _OWN)
    keepalive = os.open(directory / KEEPALIVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN)
    os.pwrite(keepalive, shim.keepalive_content(0), 0)
    shim.become_subreaper()  # if the shim itself is killed, what it held comes to us and can be found
    process, lifeline, status = _start_shim(_command(argv, directory), spec, directory, env)
    identity = identify(process.pid, spec.attempt.attempt_id, directory)
    return RunningProgram(process, identity, _Pipes(lifeline, status, control, keepalive), directory)


class RunningProgram:
    """A program under way, as its worker sees it. `keepalive` may be called from another thread than the rest."""

    def __init__(
        self, process: subprocess.Popen[bytes], identity: ProcessIdentity, pipes: _Pipes, directory: Path
    ) -> None:
        self.identity = identity
        """Of the shim: with it, another worker can end what this one left behind."""
        self.directory = directory
        self._process = process
        self._pipes = pipes
        self._reader = EventReader(directory / EVENTS)
        self._status = b""
        self._code: int | None = None
        self._counter = 0
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The program's exit code (negative: signal), None while it runs. Once it is not None, the tree is gone."""
        if self._code is not None:
            return self._code
        is_open = self._read_status()
        code = self._reported_code()
        if code is not None:
            self._end(code)
        elif not is_open:
            # the shim died without a report; its program died with it, the rest is found and ended here
            kill_below(self.identity)
            self._end(-signal.SIGTERM if self._process.wait() == -signal.SIGTERM else -signal.SIGKILL)
        return self._code

    def events(self) -> list[Event]:
        """Whole new lines since the last call; raises ProgramError on any protocol violation.

        A flood is read some 8 MiB at a time: after the end, call until nothing comes.
        """
        if self._code is None:
            self._read_status()
        for line in self._status.splitlines():
            if line.startswith(b"over "):
                name = line[5:].decode()
                raise ProgramError(f"the program wrote more than {CAPS[name] >> 20} MiB to {name}")
        return self._reader.read()

    def send(self, request_id: str, kind: RequestKind) -> None:
        """Pass a request on; the program answers with an `ack` event."""
        line = json.dumps({"id": request_id, "kind": kind.value}) + "\n"
        with self._lock:
            if self._code is None:
                os.write(self._pipes.control, line.encode())

    def keepalive(self) -> None:
        """Tell the program that its lease was renewed."""
        with self._lock:
            if self._code is None:
                self._counter += 1
                os.pwrite(self._pipes.keepalive, shim.keepalive_content(self._counter), 0)

    def terminate(self) -> None:
        """TERM to the program; does not wait."""
        self._tell(b"term\n")

    def dump_stacks(self) -> None:
        """Ask a program that hangs to write the stacks of its threads to its log; does not wait."""
        self._tell(b"stacks\n")

    def kill_tree(self, grace_s: float) -> None:
        """TERM to the program, wait the grace, KILL everything below the shim, wait until it is gone."""
        self._tell(b"kill %.3f\n" % grace_s)
        deadline = boot_seconds() + grace_s + _SHIM_PATIENCE_S
        while self.poll() is None:
            if boot_seconds() > deadline:  # the shim does not answer: stopped, or held by what it cannot kill
                kill_below(self.identity)
                self._end(-signal.SIGKILL)
            time.sleep(0.005)

    def _tell(self, command: bytes) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError, BlockingIOError):
            if self._code is None:
                os.write(self._pipes.lifeline, command)

    def _read_status(self) -> bool:
        """Take in what the shim said; False once it has closed its end."""
        try:
            while chunk := os.read(self._pipes.status, 4096):
                self._status += chunk
        except BlockingIOError:
            return True
        return False

    def _reported_code(self) -> int | None:
        for line in self._status.splitlines():
            if line.startswith(b"exit "):
                return int(line[5:])
        return None

    def _end(self, code: int) -> None:
        try:
            self._process.wait(_SHIM_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._code = code
            for handle in astuple(self._pipes):
                os.close(handle)


def tail_of_log(directory: Path, max_bytes: int = 64 << 10) -> str:
    """The end of the program's stderr, for people."""
    try:
        with open_plain(directory / STDERR) as source:
            source.seek(max(0, os.fstat(source.fileno()).st_size - max_bytes))
            return source.read(max_bytes).decode(errors="replace")
    except OSError:
        return ""


def _command(argv: Sequence[str], directory: Path) -> list[str]:
    """-P: what lies in the current folder must not be importable by a trainer."""
    interpreter = [sys.executable, "-P"] if argv[0] == "python" else [argv[0]]
    return [*interpreter, *argv[1:], "--spec", str(directory / SPEC), "--output-dir", str(directory)]


def _own_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN), "wb")


def _start_shim(
    command: list[str],
    spec: TrainSpec | EvaluateSpec | TeachSpec,
    directory: Path,
    env: Mapping[str, str] | None,
) -> tuple[subprocess.Popen[bytes], int, int]:
    lifeline_end, lifeline = os.pipe()
    status, status_end = os.pipe()
    os.set_blocking(lifeline, False)
    os.set_blocking(status, False)
    attempt = spec.attempt
    pipes = [str(lifeline_end), str(status_end), str(os.getpid())]
    caps = ",".join(f"{name}={cap}" for name, cap in CAPS.items())
    channels = [*pipes, str(directory / KEEPALIVE), str(attempt.lease_s), caps]
    try:
        with _own_file(directory / STDOUT) as stdout, _own_file(directory / STDERR) as stderr:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", shim.__file__, *channels, *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=directory,
                env={**(child_environment(os.environ) if env is None else env), MARKER: attempt.attempt_id},
                pass_fds=(lifeline_end, status_end),
                start_new_session=True,
                umask=0o077,
            )
    except BaseException:
        os.close(lifeline)
        os.close(status)
        raise
    finally:
        os.close(lifeline_end)
        os.close(status_end)
    return process, lifeline, status
