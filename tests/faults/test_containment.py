"""Nothing outlives its worker, its shim or its program; and a program whose lease is not renewed ends itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs import World, finish, strays, wait_until
from tunesmith.programs.launch import RunningProgram
from tunesmith.programs.process_identity import ProcessIdentity, identify, is_alive, kill_orphans
from tunesmith.programs.result_check import check_train_result
from tunesmith.programs.shim import all_processes, descendants, read_process
from tunesmith.runs.rules.task import AttemptState
from tunesmith.runs.spec import TrainSpec

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="containment is the process group only elsewhere"),
    pytest.mark.real_programs,  # what is between fork, exec and the first line of the program is the point
]

REPEATS = 3


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


# A worker in small: launches one program, prints the identity of its shim, renews the keepalive until it is killed.
DRIVER = """
import sys, time
from pathlib import Path
from tunesmith.runs.spec import TrainSpec
from tunesmith.programs.launch import launch

spec = TrainSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
program = launch(("python", "-m", "tunesmith.training.trainers.main"), spec, Path(sys.argv[2]))
print(program.identity.to_json(), flush=True)
while program.poll() is None:
    program.keepalive()
    time.sleep(0.05)
print(program.poll(), flush=True)
"""


class Driver:
    """A real process that plays the worker."""

    def __init__(self, world: World, spec: TrainSpec) -> None:
        self.spec = spec
        self.folder = world.folder(spec)
        path = world.root / f"{spec.attempt.attempt_id}.json"
        path.write_text(spec.model_dump_json())
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(path), str(self.folder)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.shim = ProcessIdentity.from_json(self.process.stdout.readline())

    def wait_for_step(self, step: int) -> None:
        wanted = f'"type":"metrics","step":{step},'
        wait_until(lambda: (self.folder / "events.jsonl").exists() and wanted in self.events())

    def events(self) -> str:
        return (self.folder / "events.jsonl").read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        kill_orphans(self.shim, 0.0, Path(self.shim.place))


@pytest.fixture
def drivers(world: World) -> Iterator[list[Driver]]:
    found: list[Driver] = []
    yield found
    for driver in found:
        driver.close()


def seconds_until_gone(attempt_id: str, limit_s: float) -> float:
    begin = time.monotonic()
    wait_until(lambda: not strays(attempt_id), limit_s)
    return time.monotonic() - begin


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_worker_killed_takes_a_clinging_tree_with_it(world: World, drivers: list[Driver], repeat: int) -> None:
    """The program ignores TERM, has forked, and has a daemon in a session of its own."""
    world.lease_s = 4.0
    driver = Driver(world, world.train_spec(options={"script": "cling", "at_step": 2 + repeat}))
    drivers.append(driver)
    driver.wait_for_step(1 + repeat)
    wait_until(lambda: len(strays(driver.spec.attempt.attempt_id)) == 4)  # shim, program, child, daemon
    driver.process.kill()
    driver.process.wait()
    assert seconds_until_gone(driver.spec.attempt.attempt_id, 5.0) < world.lease_s / 4 + 1.0
    wait_until(lambda: not is_alive(driver.shim), 1.0)


@pytest.mark.soak
@pytest.mark.parametrize("repeat", range(200))
def test_worker_killed_200_times_leaves_no_stray(world: World, drivers: list[Driver], repeat: int) -> None:
    world.lease_s = 2.0
    driver = Driver(world, world.train_spec(options={"script": "cling", "at_step": 1}))
    drivers.append(driver)
    time.sleep(0.002 * repeat)  # killed at another moment each time, from before the program runs to long after
    driver.process.kill()
    driver.process.wait()
    seconds_until_gone(driver.spec.attempt.attempt_id, 5.0)


def test_worker_killed_lets_a_willing_program_write_its_checkpoint(world: World, drivers: list[Driver]) -> None:
    driver = Driver(world, world.train_spec(options={"steps": 1000}))
    drivers.append(driver)
    driver.wait_for_step(3)
    driver.process.kill()
    driver.process.wait()
    seconds_until_gone(driver.spec.attempt.attempt_id, 6.0)
    assert json.loads((driver.folder / "result.json").read_bytes())["status"] == "interrupted"


def test_worker_stopped_makes_the_program_end_itself_within_its_lease(world: World, drivers: list[Driver]) -> None:
    world.lease_s = 2.0
    driver = Driver(world, world.train_spec(options={"steps": 100_000}))
    drivers.append(driver)
    driver.wait_for_step(20)
    begin = time.monotonic()
    driver.process.send_signal(signal.SIGSTOP)
    seconds_until_gone(driver.spec.attempt.attempt_id, 3.0)
    assert 0.7 * world.lease_s < time.monotonic() - begin < world.lease_s
    driver.process.send_signal(signal.SIGCONT)
    assert driver.process.stdout is not None
    assert driver.process.stdout.readline().strip() == "76"
    assert check_train_result(driver.spec, driver.folder, 76).outcome is AttemptState.LOST


def test_worker_stopped_and_program_deaf_is_ended_by_the_shim_within_the_lease(
    world: World, drivers: list[Driver]
) -> None:
    """The program's own watcher cannot run (it is stopped as well); the shim still holds the promise."""
    world.lease_s = 2.0
    driver = Driver(world, world.train_spec(options={"steps": 100_000}))
    drivers.append(driver)
    driver.wait_for_step(20)
    begin = time.monotonic()
    driver.process.send_signal(signal.SIGSTOP)
    os.kill(main_program(driver.shim.pid), signal.SIGSTOP)
    seconds_until_gone(driver.spec.attempt.attempt_id, 3.0)
    assert time.monotonic() - begin < world.lease_s + 0.3


def test_healthy_program_is_not_ended_in_many_leases(world: World) -> None:
    world.lease_s = 0.5
    running = world.launch(world.train_spec(options={"steps": 200}))
    while running.poll() is None:
        running.keepalive()
        time.sleep(0.05)
    assert running.poll() == 0


def test_program_stopped_past_its_lease_ends_itself_on_waking(world: World) -> None:
    """Nobody renews while it is stopped, and the shim is stopped too, so that only the program can act."""
    world.lease_s = 1.5
    running = world.launch(world.train_spec(options={"steps": 100_000}))
    program = started_program(running)
    running.keepalive()
    os.kill(running.identity.pid, signal.SIGSTOP)
    os.kill(program, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(program, signal.SIGCONT)
    begin = time.monotonic()
    wait_until(lambda: (process := read_process(program)) is not None and process.state == "Z", 2.0)
    assert time.monotonic() - begin < 0.3
    os.kill(running.identity.pid, signal.SIGCONT)
    assert finish(running) == 76


def main_program(shim: int) -> int:
    return next(process.pid for process in descendants(shim) if process.parent == shim)


def started_program(running: RunningProgram) -> int:
    def has_begun() -> bool:
        running.keepalive()  # on a busy machine the start may take longer than a short lease
        return bool(running.events())

    wait_until(has_begun)
    return main_program(running.identity.pid)


def test_shim_killed_takes_program_and_forks_with_it(world: World) -> None:
    spec = world.train_spec(options={"script": "cling", "at_step": 1})
    running = world.launch(spec)
    wait_until(lambda: len(strays(spec.attempt.attempt_id)) == 4)
    os.kill(running.identity.pid, signal.SIGKILL)
    assert finish(running) == -9
    assert strays(spec.attempt.attempt_id) == []
    assert [process for process in all_processes() if process.session == running.identity.pid] == []  # zombies neither


def test_shim_stopped_does_not_hinder_kill_tree(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.programs.launch._SHIM_PATIENCE_S", 0.2)
    spec = world.train_spec(options={"script": "cling", "at_step": 1})
    running = world.launch(spec)
    wait_until(lambda: len(strays(spec.attempt.attempt_id)) == 4)
    os.kill(running.identity.pid, signal.SIGSTOP)
    running.kill_tree(0.1)
    assert running.poll() == -9
    assert strays(spec.attempt.attempt_id) == []


FORK_CHAIN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    while True:          # each child forks the next one and dies: a moving target
        if os.fork():
            os._exit(0)
        time.sleep(0.0005)
time.sleep(600)
"""
BACKGROUND = """
import subprocess, sys
for _ in range(5):       # without our environment, in a session of its own, holding stdout and stderr open
    subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
"""
INTO_THE_SHIMS_GROUP = """
import os, time
if os.fork() == 0:
    os.setpgid(0, os.getsid(0))
    time.sleep(600)
time.sleep(600)
"""


def tree(running: RunningProgram) -> list[int]:
    return [process.pid for process in descendants(running.identity.pid)]


@pytest.mark.parametrize("text", [FORK_CHAIN, INTO_THE_SHIMS_GROUP], ids=["fork chain", "shim's own group"])
def test_kill_tree_ends_a_program_that_runs_away(world: World, text: str) -> None:
    running = world.launch(world.train_spec(), ("python", "-c", textwrap.dedent(text)))
    wait_until(lambda: len(tree(running)) >= 2)
    time.sleep(0.2)
    below = tree(running)
    running.kill_tree(0.2)
    assert running.poll() in (-signal.SIGKILL, -signal.SIGTERM)
    assert [pid for pid in below if read_process(pid)] == []


def test_program_end_takes_background_processes_with_it(world: World) -> None:
    running = world.launch(world.train_spec(), ("python", "-c", textwrap.dedent(BACKGROUND)))
    sleepers: set[int] = set()
    while running.poll() is None:
        sleepers.update(tree(running))
    assert running.poll() == 0
    assert len(sleepers) >= 2
    assert [pid for pid in sleepers if read_process(pid)] == []


def test_terminate_reaches_the_program_and_only_it(world: World) -> None:
    spec = world.train_spec(options={"script": "fork", "at_step": 1, "steps": 1000})
    running = world.launch(spec)
    wait_until(lambda: len(strays(spec.attempt.attempt_id)) == 4)
    running.terminate()
    assert finish(running) == 75
    judgement = check_train_result(spec, world.folder(spec), 75)
    assert judgement.outcome is AttemptState.INTERRUPTED
    assert strays(spec.attempt.attempt_id) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3])
def test_terminate_at_any_moment_of_the_start_is_an_interruption(world: World, delay_s: float) -> None:
    """Before the shim runs, between fork and exec, before the program listens, after: never lost, never a crash."""
    spec = world.train_spec(options={"steps": 100_000})
    running = world.launch(spec)
    time.sleep(delay_s)
    running.terminate()
    code = finish(running, 10.0)
    assert code in (75, -signal.SIGTERM)
    assert check_train_result(spec, world.folder(spec), code).outcome is AttemptState.INTERRUPTED


def test_term_to_the_shim_is_passed_on(world: World) -> None:
    """A service manager signals every process of the service."""
    running = world.launch(world.train_spec(options={"steps": 1000}))
    started_program(running)
    os.kill(running.identity.pid, signal.SIGTERM)
    assert finish(running) == 75


def test_kill_tree_lets_a_willing_program_end_in_order(world: World) -> None:
    running = world.launch(world.train_spec(options={"steps": 1000}))
    started_program(running)
    begin = time.monotonic()
    running.kill_tree(10.0)
    assert running.poll() == 75
    assert time.monotonic() - begin < 5.0
    running.kill_tree(1.0)  # again: nothing to do
    running.terminate()
    running.keepalive()


def test_kill_orphans_ends_what_a_dead_worker_left(world: World) -> None:
    spec = world.train_spec(options={"script": "cling", "at_step": 1})
    running = world.launch(spec)
    wait_until(lambda: len(strays(spec.attempt.attempt_id)) == 4)
    identity = ProcessIdentity.from_json(running.identity.to_json())
    assert is_alive(identity)
    assert kill_orphans(identity, 0.1, running.directory)
    assert strays(spec.attempt.attempt_id) == []
    assert not is_alive(identity)
    assert not kill_orphans(identity, 0.1, running.directory)
    assert finish(running) == -9


def test_kill_orphans_spares_a_process_that_got_the_number(world: World) -> None:
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        own = identify(sleeper.pid)
        assert is_alive(own)
        earlier = ProcessIdentity(own.pid, own.start_ticks - 1, own.boot_id, "att-gone")
        other_boot = ProcessIdentity(own.pid, own.start_ticks, "another-boot", "att-gone")
        for identity in (earlier, other_boot):
            assert not is_alive(identity)
            assert not kill_orphans(identity, 0.0, world.root)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_launch_overhead_is_small(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """From launch() to the first instruction of the program, shim included."""
    took_s = []
    for _ in range(7):
        begin = time.time()
        running = world.launch(world.train_spec(), ("/bin/sh", "-c", "date +%s.%N > first; exit 3"))
        assert finish(running) == 3
        took_s.append(float((running.directory / "first").read_text()) - begin)
    median_s = sorted(took_s)[3]
    with capsys.disabled():
        sys.stdout.write(f"\nlaunch() to the program's first instruction: median {1000 * median_s:.0f} ms\n")
    assert median_s < 0.5
