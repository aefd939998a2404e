"""Processes that start in milliseconds: forked from one that has imported everything, instead of a new interpreter.

They are real processes with a pid, a session, signals, an environment and a folder of their own; what they leave out is
`exec` and the second of imports after it. Two kinds:

- `start_quickly` runs a command of `tunesmith` below a warm process of this session (see `_serve`). The test process
  itself must not be forked for it: SQLite keeps its locks per process and a child that opens the same file would
  believe that it holds its parent's.
- `QuickPopen` stands in for `subprocess.Popen` where a worker starts a shim, and where a server starts its engine:
  our trainers, evaluators and teachers are forked from their worker, which imports at the first of them what they need
  (torch: five seconds); engines from their server; dry runs and parsers from who starts them. None of them opens the
  store. Workers and servers are forked from a warm process of their own that has torch. Everything else is started as
  ever.

A test whose subject is the start itself (imports, interpreter options, warnings) asks for real processes: `real=True`,
or the mark `real_programs`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import importlib.util
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.shared_work import keep_what_is_there


def _modules_of(part: str) -> list[str]:
    spec = importlib.util.find_spec("tunesmith")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / part
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


HELPERS = ("tunesmith.training.trainers.dry_run", "tunesmith.datasets.parse_pool")
PROGRAMS = (
    "tunesmith.training.trainers.main",
    "tunesmith.evaluation.evaluators.main",
    "tunesmith.curriculum.teachers.main",
)
_EVALUATOR = "tunesmith.evaluation.evaluators.model_backend"
_TEACHER = "tunesmith.curriculum.teachers.answering"
_TRAINERS = {"native": "tunesmith.training.trainers.native.train"}
_PRELOADED = (
    "alembic.command",
    "alembic.config",
    "pandas",  # pyarrow imports it where it is installed
    "pyarrow.parquet",
    "rich.console",
    "rich.table",
    "uvicorn",
    *(f"tunesmith.{part}.{name}" for part in ("cli", "client") for name in _modules_of(part)),
    "pysqlite3.dbapi2",
    "tunesmith.datasets.blocks",
    "tunesmith.datasets.dataset_screens",
    "tunesmith.datasets.formats.traces",
    "tunesmith.datasets.prepare",
    "tunesmith.datasets.prepare_folder",
    "tunesmith.evaluation.evaluators.main",
    "tunesmith.experience.assemble",
    "tunesmith.orchestration.dry_run",
    "tunesmith.orchestration.worker",
    "tunesmith.serving.gateway.server",
    "tunesmith.store.schema",
    "tunesmith.training.memory_estimate",
    "tunesmith.training.trainers.registry",
    "tunesmith.programs.host",
    "tunesmith.training.trainers.sim.sim",
)
_WITH_TORCH = (*_PRELOADED, "tunesmith.serving.engine.program", _EVALUATOR, *_TRAINERS.values())
_MAX_REQUEST = 1 << 20


# --- what a forked child does ---


def _become(
    main: Callable[[], object],
    argv: Sequence[str],
    *,
    streams: Sequence[int],
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    kept: Sequence[int] = (),
    new_session: bool = False,
    umask: int = -1,
) -> NoReturn:
    """In a child just forked: take on the streams, folder and environment of a new process, run, end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as every Python has it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if new_session:
            os.setsid()
        copies = [os.dup(stream) for stream in streams]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        _close_all_but({0, 1, 2, *kept})
        for handle in kept:
            os.set_inheritable(handle, True)
        if cwd is not None:
            os.chdir(cwd)
        if umask >= 0:
            os.umask(umask)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        _show_in_proc(argv, os.environ)
        atexit._clear()  # what the parent wanted at its own end
        sys.argv = list(argv)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the streams of this process
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        code = _exit_code(main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _exit_code(main: Callable[[], object]) -> int:
    """Run to the end as an interpreter does: exit code, waiting for threads, exit handlers, flushed streams."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _show_in_proc(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Let /proc tell the child's own command and environment: processes of an attempt are found by a variable there."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    places = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end
    marks_first = sorted(env.items(), key=lambda item: not item[0].startswith("TUNESMITH"))
    texts = ["\0".join(argv), "\0".join(f"{name}={value}" for name, value in marks_first)]
    for text, start, end in zip(texts, places[::2], places[1::2], strict=True):
        room = end - start
        if room > 0:
            ctypes.memmove(start, os.fsencode(text)[: room - 1].ljust(room, b"\0"), room)


def _fork() -> int:
    with warnings.catch_warnings():  # newer interpreters warn of threads; the child uses nothing that they may hold
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# --- programs, forked from their worker ---


class QuickPopen(subprocess.Popen[bytes]):
    """`subprocess.Popen` of a shim, forked where its program is one of ours, and of an engine."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """The arguments are those of the standard library's own method, in its order."""
        words = [os.fspath(word) for word in args]
        main = _main_of(words)
        if main is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        _executable, _preexec, _close, pass_fds, cwd, env, *_ = rest
        p2cread, _, _, c2pwrite, _, errwrite = rest[9:15]
        umask, new_session = rest[19], rest[20]
        self.pid = _fork()
        if self.pid == 0:
            _become(
                main,
                words,
                streams=[own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))],
                cwd=cwd,
                env=env,
                kept=pass_fds,
                new_session=new_session,
                umask=umask,
            )
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]


def _main_of(words: Sequence[str]) -> Callable[[], object] | None:
    """What a fork runs instead of this command; None where it has to be started as ever."""
    if words[1:4] == ["-P", "-m", "tunesmith.serving.engine.main"]:
        return lambda: _run_engine(words[4:])
    if "-m" in words[:3] and words[words.index("-m") + 1] in HELPERS:
        return lambda: _run_module(words)
    needed = _needed_by(words)
    if needed is None:
        return None
    for module in needed:
        importlib.import_module(module)
    return lambda: _run_shim(words[4:])


def _run_shim(words: Sequence[str]) -> NoReturn:
    from tunesmith.programs import shim

    os.execvp = _program_instead  # type: ignore[assignment]
    sys.exit(shim.main(list(words)))


def _run_engine(words: Sequence[str]) -> NoReturn:
    from tunesmith.serving.engine.main import main

    logging.getLogger("tunesmith").handlers.clear()  # those of the server
    sys.exit(main(list(words)))


def _needed_by(words: Sequence[str]) -> tuple[str, ...] | None:
    """What one of our own programs imports beyond what every worker has; None for a program of somebody else."""
    if "--spec" not in words or not set(PROGRAMS) & set(words):
        return None
    spec = json.loads(Path(words[words.index("--spec") + 1]).read_bytes())
    if spec["kind"] == "train":
        trainer = spec["run"]["trainer"]
        return () if trainer == "sim" else (_TRAINERS[trainer],) if trainer in _TRAINERS else None
    if spec["kind"] == "evaluate":
        return () if _is_simulated_evaluation(spec) else (_EVALUATOR,)
    return (_TEACHER,)


def _is_simulated_evaluation(spec: Mapping[str, Any]) -> bool:
    """Adapters of the sim trainer carry their script."""
    from pydantic import ValidationError

    from tunesmith.evaluation.evaluators import sim
    from tunesmith.runs.spec import EvaluateSpec

    try:
        return sim.is_simulated(EvaluateSpec.model_validate_json(json.dumps(spec)))
    except (OSError, ValidationError):
        return False


def _program_instead(_file: str, command: Sequence[str]) -> NoReturn:
    """What the shim's child does instead of `exec`: it is the program already."""
    _become(lambda: _run_module(command), command, streams=(0, 1, 2), cwd=None, env=None)


def _run_module(command: Sequence[str]) -> None:
    import runpy

    module = command[command.index("-m") + 1]
    sys.modules.pop(module, None)
    sys.argv = [module, *command[command.index("-m") + 2 :]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# --- commands of tunesmith, forked from a warm process ---


class QuickProcess:
    """A command under way below the warm process, with what tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, words: Sequence[str]) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        self._connection = connection
        self.pid = int(self._line())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._line())
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> QuickProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _line(self) -> bytes:
        said = b""
        while not said.endswith(b"\n"):
            part = self._connection.recv(64)
            if not part:
                raise RuntimeError(f"the warm process is gone; it ran {self.args}")
            said += part
        return said


class _Warm:
    """A warm process of this session of tests: the first that needs it starts it, its other processes share it."""

    def __init__(self, kind: str, preloaded: Sequence[str]) -> None:
        self._kind = kind
        self._preloaded = list(preloaded)
        self._session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()

    def connect(self) -> socket.socket:
        # abstract: leaves no file. A test may have moved this process to a mount namespace of its own.
        where = f"\0tunesmith-tests-{self._session}-{self._kind}-{os.readlink('/proc/self/ns/mnt')}"
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(where)
                return connection
            except ConnectionRefusedError:
                connection.close()
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
                try:
                    listening.bind(where)
                except OSError:  # another process is between here and the next line
                    time.sleep(0.01)
                    continue
                listening.listen(64)
                self._start(listening.fileno())

    def _start(self, listening: int) -> None:
        from support.workspaces import cli_environ

        # room for what /proc shall tell of a child
        env = {**cli_environ(), **_AT_START, "ROOM_FOR_THE_ENVIRONMENT": "x" * 4096}
        room = "x" * 2048
        paths = json.dumps([str(Path(__file__).parents[1])])
        code = (
            f"import sys; sys.path += {paths}; from support.quick_processes import _serve; "
            f"_serve({listening}, {self._preloaded}, {self._session})"
        )
        null = subprocess.DEVNULL
        command = [sys.executable, "-c", code, room]
        started = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[listening], env=env, cwd="/")
        _started.append(started)


_started: list[subprocess.Popen[bytes]] = []
"""Kept, because a `Popen` that is collected while its process runs warns. They end with the session."""
_warm = _Warm("commands", _PRELOADED)
_warm_with_torch = _Warm("torch", _WITH_TORCH)


def start_quickly(
    words: Sequence[str | os.PathLike[str]],
    *,
    cwd: str | os.PathLike[str],
    env: Mapping[str, str],
    stdout: int,
    stderr: int,
) -> QuickProcess:
    """`tunesmith WORDS` without standard input; the two streams are file descriptors that the caller closes."""
    argv = [os.fspath(word) for word in words]
    request = {"argv": argv, "cwd": os.fspath(cwd), "env": dict(env), "fork": _forks_programs()}
    return _start(_warm_with_torch if argv[:1] in (["serve"], ["worker"]) else _warm, request, stdout, stderr)


def run_code(
    code: str, *argv: str | os.PathLike[str], with_torch: bool = False, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ARGV…` in a fork that has tunesmith's modules: a drill that kills itself in the middle of it."""
    words = ["-c", *map(os.fspath, argv)]
    request = {"argv": words, "cwd": os.getcwd(), "env": dict(os.environ), "fork": False, "code": code}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _start(_warm_with_torch if with_torch else _warm, request, out.fileno(), err.fileno())
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(words, process.wait(), out.read(), err.read())


def _start(warm: _Warm, request: Mapping[str, Any], stdout: int, stderr: int) -> QuickProcess:
    connection = warm.connect()
    with open(os.devnull) as nothing:
        handles = array.array("i", [nothing.fileno(), stdout, stderr])
        data = json.dumps(request).encode("utf-8", "surrogateescape") + b"\n"
        connection.sendmsg([data[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
        connection.sendall(data[1:])
        return QuickProcess(connection, request["argv"])


def can_start_quickly(env: Mapping[str, str]) -> bool:
    """Whether nothing in the environment asks for another interpreter than the warm one."""
    return _of_interpreter(env) == _AT_START


def _of_interpreter(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter reads when it starts; the tests may have changed it since the warm one did."""
    return {k: v for k, v in env.items() if k.startswith(("PYTHON", "LC_", "LANG", "COVERAGE", "LD_")) and v != ""}


_AT_START = _of_interpreter({**os.environ, "PYTHONWARNINGS": "error"})


def _serve(listening_handle: int, preloaded: Sequence[str], session: int) -> NoReturn:
    """The warm process: one child per request, whose end is told on its connection."""
    for name in preloaded:
        importlib.import_module(name)
    importlib.import_module("tunesmith.cli.main").command_tree()
    keep_what_is_there()  # children that collect garbage would copy every page
    listening = socket.socket(fileno=listening_handle)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asked: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while Path(f"/proc/{session}").exists():
            for key, _ in selector.select(1.0):
                if key.fileobj is listening:
                    connection, _ = listening.accept()
                    asked[_start_one(connection)] = connection
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
            for pid, code in _ended():
                connection = asked.pop(pid)
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % code)
                connection.close()
    os._exit(0)


def _ended() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _start_one(connection: socket.socket) -> int:
    room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(_MAX_REQUEST, room)
    handles = array.array("i")
    handles.frombytes(ancillary[0][2])
    while not data.endswith(b"\n"):
        data += connection.recv(_MAX_REQUEST)
    request = json.loads(data.decode("utf-8", "surrogateescape"))
    pid = os.fork()
    if pid == 0:
        from tunesmith.cli import main as cli

        if request["fork"]:
            fork_programs()
        if request["fork"] and request["argv"][:1] == ["serve"]:
            _fork_engines()
        main, words = cli.main, ["tunesmith", *request["argv"]]
        if (code := request.get("code")) is not None:
            main, words = functools.partial(exec, code, {"__name__": "__main__"}), request["argv"]
        _become(main, words, streams=handles, cwd=request["cwd"], env=request["env"])
    for handle in handles:
        os.close(handle)
    connection.sendall(b"%d\n" % pid)
    return pid


# --- who uses what ---


def fork_programs() -> Callable[[], None]:
    """From now on this process forks our programs, dry runs and parsers; returns what ends that."""
    from tunesmith.datasets import parse_pool
    from tunesmith.orchestration import dry_run
    from tunesmith.programs import launch

    starters: list[Any] = [launch, dry_run, parse_pool]
    for module in starters:
        module.subprocess = _Replaced(subprocess)

    def end() -> None:
        for module in starters:
            module.subprocess = subprocess

    return end


def _fork_engines() -> None:
    """In a server's process: its engines are forked from it."""
    from asyncio import unix_events

    unix_events.subprocess = _Replaced(subprocess)  # type: ignore[assignment, attr-defined]


def _forks_programs() -> bool:
    from tunesmith.programs import launch

    return isinstance(launch.subprocess, _Replaced)


class _Replaced:
    """The module `subprocess` with another `Popen`."""

    Popen = QuickPopen

    def __init__(self, module: Any) -> None:
        self._module = module

    def run(self, args: Sequence[str], *, input: bytes, capture_output: bool, **more: Any) -> Any:
        assert capture_output
        pipe = subprocess.PIPE
        more.pop("check")
        with QuickPopen(args, stdin=pipe, stdout=pipe, stderr=pipe, **more) as process:
            out, err = process.communicate(input)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
