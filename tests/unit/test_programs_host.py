"""The program's side: how programs end, what they say, and how they notice that nobody renews their lease."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs import World, finish, wait_until
from tunesmith.core.errors import ConfigError, DataError, MissingExtra, NotFound, ProgramError, StoreError
from tunesmith.programs.host import ProgramFailure, as_failure
from tunesmith.programs.launch import launch, tail_of_log
from tunesmith.programs.protocol import CAPS, Ack, Log, Started
from tunesmith.programs.result_check import check_train_result
from tunesmith.programs.shim import KeepaliveClock, boot_now, keepalive_content
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import AttemptState, ErrorClass


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def program(body: str) -> tuple[str, ...]:
    """A program whose main function has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    text = f"import errno, os, sys, time\nfrom tunesmith.programs.host import *\n\ndef main(program):\n{lines}\n"
    return ("python", "-c", f"{text}\nsys.exit(host(main))")


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


FAILURES: list[tuple[BaseException, ErrorClass]] = [
    (ProgramFailure(ErrorClass.NONFINITE, "x"), ErrorClass.NONFINITE),
    (DataError("x"), ErrorClass.DATA),
    (ConfigError("x"), ErrorClass.CONFIG),
    (NotFound("x"), ErrorClass.CONFIG),
    (MissingExtra("x"), ErrorClass.MISSING),
    (ProgramError("x"), ErrorClass.PROTOCOL),
    (StoreError("x"), ErrorClass.BUG),
    (MemoryError(), ErrorClass.OOM),
    (OutOfMemoryError("x"), ErrorClass.OOM),
    (RuntimeError("CUDA out of memory. Tried to allocate"), ErrorClass.OOM),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), ErrorClass.OOM),
    (OSError(errno.ENOMEM, "x"), ErrorClass.OOM),
    (RuntimeError("shape mismatch"), ErrorClass.BUG),
    (ModuleNotFoundError("x"), ErrorClass.MISSING),
    (FileNotFoundError("x"), ErrorClass.MISSING),
    (PermissionError("x"), ErrorClass.CONFIG),
    (OSError(errno.EIO, "x"), ErrorClass.TRANSIENT),
    (ConnectionResetError("x"), ErrorClass.TRANSIENT),
    (KeyboardInterrupt(), ErrorClass.BUG),
    (SystemExit(0), ErrorClass.BUG),
]


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: type(value).__name__)
def test_failure_of_each_exception_has_its_class(error: BaseException, expected: ErrorClass) -> None:
    assert as_failure(error).error_class is expected


def test_failure_message_is_one_bounded_line() -> None:
    message = as_failure(ValueError("a\nb\n" + "x" * 10_000)).message
    assert message.startswith("ValueError: a b x")
    assert len(message) <= 2000


def test_disk_full_is_told_from_other_errors() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        assert as_failure(OSError(number, "x")).error_class is ErrorClass.DISK
    assert as_failure(OSError(errno.EIO, "x")).error_class is ErrorClass.TRANSIENT
    of_a_library = RuntimeError("I/O error: No space left on device (os error 28)")
    assert as_failure(of_a_library).error_class is ErrorClass.DISK


@pytest.mark.parametrize(
    ("body", "code", "outcome", "error_class"),
    [
        ("raise MemoryError", 1, AttemptState.FAILED, ErrorClass.OOM),
        ("raise OSError(errno.ENOSPC, 'full')", 75, AttemptState.INTERRUPTED, ErrorClass.DISK),
        ("import no_such_package", 1, AttemptState.FAILED, ErrorClass.MISSING),
        ("sys.exit(0)", 1, AttemptState.FAILED, ErrorClass.BUG),
        (
            "return program.result('succeeded', detail={'x': 'y' * (2 << 20)})",
            1,
            AttemptState.FAILED,
            ErrorClass.BUG,
        ),
        ("return None", 1, AttemptState.FAILED, ErrorClass.BUG),
        ("os._exit(3)", 3, AttemptState.FAILED, ErrorClass.CRASH),
        ("program.log('x' * (2 << 20))", 1, AttemptState.FAILED, ErrorClass.BUG),
    ],
)
def test_program_that_ends_badly_is_judged_by_why(
    world: World, body: str, code: int, outcome: AttemptState, error_class: ErrorClass | None
) -> None:
    spec = world.train_spec()
    assert world.run(spec, program(body)) == code
    judgement = check_train_result(spec, world.folder(spec), code)
    assert (judgement.outcome, judgement.error_class) == (outcome, error_class), judgement.error


def test_program_prints_go_to_the_log_not_to_stdout(world: World) -> None:
    spec = world.train_spec()
    body = "print('loud library')\nos.system('echo loud child')\nreturn program.result('interrupted')"
    assert world.run(spec, program(body)) == 75
    assert check_train_result(spec, world.folder(spec), 75).outcome is AttemptState.INTERRUPTED
    log = tail_of_log(world.folder(spec))
    assert "loud library" in log
    assert "loud child" in log
    assert (world.folder(spec) / "stdout.json").read_bytes() == (world.folder(spec) / "result.json").read_bytes()


def test_program_traceback_is_in_the_log_and_one_line_in_the_result(world: World) -> None:
    spec = world.train_spec()
    assert world.run(spec, program("raise ValueError('first\\nsecond')")) == 1
    judgement = check_train_result(spec, world.folder(spec), 1)
    assert judgement.error == "ValueError: first second"
    assert "Traceback" in tail_of_log(world.folder(spec))
    assert tail_of_log(world.folder(spec), 10).endswith("second\n")
    assert tail_of_log(world.folder(spec) / "no-such-folder") == ""


def test_program_hears_requests_once_and_answers(world: World) -> None:
    spec = world.train_spec()
    body = """
wishes = []
while len(wishes) < 2:
    wishes += program.requests()
    time.sleep(0.01)
for wish in wishes:
    program.ack(wish.id, wish.kind.value)
program.log(str(len(program.requests())))
return program.result('interrupted')
"""
    running = world.launch(spec, program(body))
    running.send("rq-1", RequestKind.CHECKPOINT)
    running.send("rq-2", RequestKind.PAUSE)
    assert finish(running) == 75
    events = running.events()
    assert [(e.request_id, e.detail) for e in events if isinstance(e, Ack)] == [
        ("rq-1", "checkpoint"),
        ("rq-2", "pause"),
    ]
    assert [e.message for e in events if isinstance(e, Log)] == ["0"]
    assert isinstance(events[0], Started)


def test_program_mirrors_its_progress_for_other_tools(world: World) -> None:
    spec = world.train_spec(options={"steps": 3})
    assert world.run(spec) == 0
    status = json.loads((world.folder(spec) / "status.json").read_bytes())
    assert status | {"pid": 0} == {
        "v": 1,
        "attempt_id": spec.attempt.attempt_id,
        "pid": 0,
        "phase": "save",
        "done": 0,  # of this phase: a counter of the last one would mislead
        "total": 0,
        "unit": "",
        "finished": "succeeded",
    }


def test_program_without_a_readable_spec_says_so(world: World) -> None:
    spec = world.train_spec()
    folder = world.folder(spec)
    argv = (
        "python",
        "-c",
        "import sys, os; from tunesmith.programs.host import host; "
        "open(sys.argv[2], 'w').write('{}'); sys.exit(host(lambda program: None))",
    )
    assert world.run(spec, argv) == 2
    assert "not a spec of version 1" in tail_of_log(folder)
    assert check_train_result(spec, folder, 2).error_class is ErrorClass.CONFIG


def test_program_started_by_other_code_than_submitted_is_a_mismatch(world: World) -> None:
    fingerprints = world.run_spec().fingerprints.model_copy(update={"code": "0" * 64})
    spec = world.train_spec(fingerprints=fingerprints)
    assert world.run(spec) == 1
    judgement = check_train_result(spec, world.folder(spec), 1)
    assert judgement.error_class is ErrorClass.MISMATCH
    assert "run retry" in (judgement.error or "")


def test_launch_unknown_command_is_missing(world: World) -> None:
    spec = world.train_spec()
    assert world.run(spec, ("no-such-trainer-command",)) == 127
    assert check_train_result(spec, world.folder(spec), 127).error_class is ErrorClass.MISSING
    assert "no-such-trainer-command" in tail_of_log(world.folder(spec))


def test_launch_into_a_used_folder_is_refused(world: World) -> None:
    spec = world.train_spec(options={"steps": 1})
    assert world.run(spec) == 0
    with pytest.raises(ProgramError, match="of its own"):
        launch(("python", "-c", "pass"), spec, world.folder(spec))


def test_launch_environment_is_passed_with_the_marker(world: World) -> None:
    spec = world.train_spec()
    body = "program.log(os.environ['TUNESMITH_ATTEMPT'] + os.environ['EXTRA'])\nreturn program.result('interrupted')"
    running = launch(program(body), spec, world.folder(spec), env={"EXTRA": "!", "PATH": "/usr/bin:/bin"})
    assert finish(running) == 75
    assert [e.message for e in running.events() if isinstance(e, Log)] == [spec.attempt.attempt_id + "!"]


def test_launch_stdout_flood_is_noticed_while_it_runs(world: World) -> None:
    spec = world.train_spec()
    running = world.launch(spec, ("python", "-c", "import time; print('x' * (2 << 20), flush=True); time.sleep(60)"))
    with pytest.raises(ProgramError, match=r"stdout\.json"):
        wait_until(lambda: (running.events(), None)[1])


FLOODS = {
    "stdout": "while True: os.write(1, b'x' * 65536)",
    "stderr": "while True: os.write(2, b'x' * 65536)",
    "stdout by name": "sink = open('stdout.json', 'wb', 0)\nwhile True: sink.write(b'x' * 65536)",
    "events": "sink = open('events.jsonl', 'wb', 0)\nwhile True: sink.write(b'x' * 1048576)",
    "by many": "[os.fork() for _ in range(4)]\nwhile True: os.write(2, b'x' * 65536)",
    "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: os.write(1, b'x' * 65536)",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_flood_is_killed_at_its_cap_and_the_file_is_no_larger(world: World, flood: str) -> None:
    spec = world.train_spec()
    running = world.launch(spec, ("python", "-c", f"import os, signal\n{FLOODS[flood]}"))
    most = 0

    def ended() -> int | None:
        nonlocal most
        for name, cap in CAPS.items():
            with contextlib.suppress(FileNotFoundError):
                most = max(most, (running.directory / name).stat().st_size - cap)
        return running.poll()

    assert wait_until(ended, timeout_s=60) != 0
    with pytest.raises(ProgramError, match="the program wrote more than"):
        running.events()
    for name, cap in CAPS.items():
        path = running.directory / name
        assert not path.exists() or path.stat().st_size <= cap, f"{name} is past its cap"
    # what is written into the file itself, past the shim, is only noticed by looking at it every few milliseconds
    assert most < (512 if flood in ("stdout by name", "events") else 16) << 20, f"a cap was passed by {most >> 20} MiB"


def test_output_below_the_cap_arrives_whole(world: World) -> None:
    spec = world.train_spec()
    body = "import os, sys; [os.write(2, b'y' * 1000) for _ in range(5000)]; os.write(1, b'z' * 1000000)"
    running = world.launch(spec, ("python", "-c", body))
    assert finish(running) == 0
    assert (running.directory / "stderr.log").stat().st_size == 5_000_000
    assert (running.directory / "stdout.json").stat().st_size == 1_000_000


def write(path: Path, counter: int) -> None:
    path.write_bytes(keepalive_content(counter))


def test_keepalive_age_grows_until_it_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / "keepalive"
    write(path, 0)
    clock = KeepaliveClock(str(path))
    time.sleep(0.05)
    assert 0.05 <= clock.age_s() < 1.0
    write(path, 1)
    assert clock.age_s() < 0.05


def test_keepalive_touched_but_not_renewed_ages(tmp_path: Path) -> None:
    path = tmp_path / "keepalive"
    write(path, 0)
    clock = KeepaliveClock(str(path))
    time.sleep(0.05)
    path.write_bytes(path.read_bytes())
    assert clock.age_s() >= 0.05


def test_keepalive_missing_or_emptied_file_ages(tmp_path: Path) -> None:
    path = tmp_path / "keepalive"
    write(path, 0)
    clock = KeepaliveClock(str(path))
    time.sleep(0.05)
    path.write_bytes(b"")
    assert clock.age_s() >= 0.05
    path.unlink()
    assert clock.age_s() >= 0.05


def test_keepalive_renewed_long_before_it_was_seen_is_as_old_as_its_stamp(tmp_path: Path) -> None:
    """The looker was stopped: the worker renewed once more and then stopped too."""
    path = tmp_path / "keepalive"
    write(path, 0)
    clock = KeepaliveClock(str(path))
    write(path, 1)
    time.sleep(0.2)
    assert clock.age_s() >= 0.2


def test_keepalive_renewal_without_a_usable_stamp_counts_from_the_last_look(tmp_path: Path) -> None:
    path = tmp_path / "keepalive"
    write(path, 0)
    clock = KeepaliveClock(str(path))
    time.sleep(0.1)
    path.write_bytes(b"7 %f some-other-boot\n" % boot_now())
    assert clock.age_s() >= 0.1
    time.sleep(0.05)
    path.write_bytes(b"\xff not a stamp at all")
    assert 0.05 <= clock.age_s() < 0.1


def test_keepalive_stamp_from_the_future_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "keepalive"
    write(path, 0)
    clock = KeepaliveClock(str(path))
    content = keepalive_content(1).split()
    path.write_bytes(b" ".join([content[0], b"%f" % (boot_now() + 1e6), content[2]]))
    assert 0.0 <= clock.age_s() < 0.05
    time.sleep(0.05)
    assert clock.age_s() >= 0.05


@pytest.mark.parametrize(
    "module",
    ["tunesmith.training.trainers.main", "tunesmith.evaluation.evaluators.main", "tunesmith.datasets.parse_pool"],
)
def test_program_starts_without_the_store_and_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'sqlalchemy', 'alembic', 'torch', 'fastapi'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
