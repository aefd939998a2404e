"""The quick processes of the tests stand in for the programs that a worker really starts, and behave like them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.quick_processes import PROGRAMS
from support.workspaces import a_workspace, cli, start_worker, stop_worker, submit, wait_for_state, work_here
from tunesmith.client import Client
from tunesmith.curriculum.teachers.local import PROGRAM as TEACHER
from tunesmith.evaluation.evaluate import EVALUATOR_PROGRAM
from tunesmith.programs.event_log import EventReader
from tunesmith.programs.protocol import EVENTS, STDERR
from tunesmith.training.trainers.registry import find_trainer


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return a_workspace(tmp_path)


def test_programs_that_are_forked_are_those_that_workers_start() -> None:
    assert set(PROGRAMS) == {EVALUATOR_PROGRAM[-1], find_trainer("sim").argv[-1], TEACHER[-1]}
    assert find_trainer("native").argv[-1] in PROGRAMS


@pytest.mark.slow
def test_command_has_its_own_folder_environment_streams_and_code(client: Client) -> None:
    root = client.workspace.root
    quick, real = (cli("run", "show", "run-x", cwd=root, real=real) for real in (False, True))
    assert (quick.code, quick.out, quick.err) == (real.code, real.out, real.err)
    assert quick.code == 1
    elsewhere = {"TUNESMITH_WORKSPACE": str(root)}
    quick, real = (
        cli("profile", "list", "--json", cwd=root.parent, env=elsewhere, real=real) for real in (False, True)
    )
    assert (quick.code, quick.out, quick.err) == (real.code, real.out, real.err)
    assert quick.json


def test_forked_run_ends_as_a_real_one_and_is_found_by_its_marker(client: Client) -> None:
    run_id = submit(client)
    assert work_here(client) == 4
    assert client.runs.get(run_id).state == "deployed"
    [attempt] = [each for each in client.runs.show(run_id).attempts if each.task == "train"]
    folder = client.workspace.runs_dir / run_id / attempt.id
    started = EventReader(folder / EVENTS).read()[0]
    assert started.pid != os.getpid()
    assert (folder / STDERR).read_bytes() == b""


def test_forked_worker_hears_term_and_says_so(client: Client) -> None:
    run_id = submit(client)
    worker = start_worker(client)
    try:
        assert wait_for_state(client, run_id, "deployed") == "deployed"
        assert worker.poll() is None
        assert Path(f"/proc/{worker.pid}/cwd").resolve() == client.workspace.root
        assert Path(f"/proc/{worker.pid}/cmdline").read_bytes().startswith(b"tunesmith\0worker\0")
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        stop_worker(worker)
