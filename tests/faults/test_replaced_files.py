"""A program puts a pipe or a link in the place of a file of its attempt: nobody waits for it or follows it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.programs import World, finish, wait_until
from support.workspaces import a_workspace, submit
from tunesmith.client.attempt_progress import read_progress
from tunesmith.core.errors import DataError
from tunesmith.core.files import read_manifest
from tunesmith.programs.launch import tail_of_log
from tunesmith.programs.protocol import EXIT_KEEPALIVE_LOST
from tunesmith.runs.rules.request import RequestKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pipes and links as Linux has them")

PUTS_A_PIPE = """
import os, sys, time
os.unlink({name!r}); os.mkfifo({name!r}); open("done", "w").close(); time.sleep(600)
"""
PUTS_A_LINK = """
import os, sys, time
os.unlink({name!r}); os.symlink({target!r}, {name!r}); open("done", "w").close(); time.sleep(600)
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def within(seconds: float, work: Callable[[], object]) -> None:
    """Fails, instead of waiting for ever, where `work` hangs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


def test_pipe_as_control_file_does_not_keep_the_worker_waiting(world: World) -> None:
    running = world.launch(world.train_spec(), ("python", "-c", PUTS_A_PIPE.format(name="control.jsonl")))
    wait_until((running.directory / "done").exists)
    within(5, lambda: running.send("req-1", RequestKind.STOP))


def test_link_as_control_file_is_not_written_through(world: World) -> None:
    foreign = world.root / "foreign.txt"
    foreign.write_text("mine\n")
    text = PUTS_A_LINK.format(name="control.jsonl", target=str(foreign))
    running = world.launch(world.train_spec(), ("python", "-c", text))
    wait_until((running.directory / "done").exists)
    running.send("req-1", RequestKind.STOP)
    assert foreign.read_text() == "mine\n"


def test_removed_control_file_is_no_error_of_the_worker(world: World) -> None:
    running = world.launch(world.train_spec(options={"steps": 100_000}))
    (running.directory / "control.jsonl").unlink()
    running.send("req-1", RequestKind.STOP)


def test_pipe_as_keepalive_does_not_blind_the_shim(world: World) -> None:
    world.lease_s = 2.0
    running = world.launch(world.train_spec(), ("python", "-c", PUTS_A_PIPE.format(name="keepalive")))
    wait_until((running.directory / "done").exists)
    assert finish(running, 10) == EXIT_KEEPALIVE_LOST


def test_pipe_or_link_as_log_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stderr.log")
    within(5, lambda: tail_of_log(tmp_path))
    (tmp_path / "stderr.log").unlink()
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "stderr.log").symlink_to(tmp_path / "secret")
    assert tail_of_log(tmp_path) == ""


def test_whatever_lies_in_place_of_the_event_log_run_metrics_answers(tmp_path: Path) -> None:
    client = a_workspace(tmp_path)
    run_id = submit(client)
    client.system.worker(["train"]).run(until_idle=True)
    [log] = client.workspace.runs_dir.glob(f"{run_id}/*/events.jsonl")
    good = json.dumps({"type": "metrics", "step": 1, "values": {"loss": 1.0}}) + "\n"
    for odd in ("[" * 100_000, '{"type": "metrics"}', '{"type": "metrics", "step": 2, "values": [1]}'):
        log.write_text(good + odd + "\n")
        assert [point["step"] for point in client.runs.metrics(run_id)] == [1], odd[:50]
    (tmp_path / "foreign").write_text(good)
    log.unlink()
    log.symlink_to(tmp_path / "foreign")
    assert list(client.runs.metrics(run_id)) == []
    log.unlink()
    os.mkfifo(log)
    within(5, lambda: client.runs.metrics(run_id))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"phase": "train", "done": 1e400}', '{"phase": "train"}'])
def test_odd_status_or_events_never_stop_run_show(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    (tmp_path / "events.jsonl").write_text('{"type":"metrics","values":' + "[" * 100_000 + "\n")
    progress = read_progress(tmp_path)
    assert progress is None or progress.metrics is None


@pytest.mark.parametrize("name", ["status.json", "events.jsonl"])
def test_pipe_as_status_or_events_does_not_keep_run_show_waiting(tmp_path: Path, name: str) -> None:
    (tmp_path / "status.json").write_text('{"phase": "train"}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    within(5, lambda: read_progress(tmp_path))


def test_manifest_of_nothing_but_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="not a readable manifest"):
        read_manifest(tmp_path)
