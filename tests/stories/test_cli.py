"""Stories told with the command line alone: real processes, the sim trainer, every noun and verb."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from fcntl import ioctl
from pathlib import Path

import pytest

from support.quick_processes import start_quickly
from support.workspaces import (
    Ended,
    a_jsonl,
    a_profile,
    a_workspace,
    cli,
    cli_environ,
    start_worker,
    stop_worker,
    submit,
    wait_for,
    wait_for_state,
    work_here,
    work_until_idle,
)
from tunesmith.cli.main import call
from tunesmith.cli.run_page import show_metrics
from tunesmith.client import Client

RUN_ID = re.compile(r"run-[0-9a-z]{12}\Z")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SLOW = {"steps": 2000, "step_s": 0.02}

Tell = Callable[..., Ended]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path) as client:
        yield client


@pytest.fixture
def tell(client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    """`tunesmith WORDS…` in the workspace, from words to exit code in this process; workers are processes of their own.

    It must succeed unless another exit code is expected.
    """
    monkeypatch.chdir(client.workspace.root)
    return lambda *words, code=0: told(words, code, capsys)


def told(words: Sequence[str | Path], code: int, capsys: pytest.CaptureFixture[str]) -> Ended:
    begun = time.monotonic()
    ended = call([str(word) for word in words])
    end = Ended(ended, *capsys.readouterr(), time.monotonic() - begun)
    assert end.code == code, end
    return end


@pytest.fixture
def tell_for_real(client: Client) -> Tell:
    """The same, as a process of its own."""

    def tell(*words: str | Path, code: int = 0) -> Ended:
        end = cli(*words, cwd=client.workspace.root)
        assert end.code == code, end
        return end

    return tell


@pytest.fixture
def worker(client: Client) -> Iterator[subprocess.Popen[bytes]]:
    process = start_worker(client)
    yield process
    assert stop_worker(process) == 0, "TERM ends a worker in order"


def test_init_from_nothing_makes_a_workspace_and_says_what_is_next(tmp_path: Path) -> None:
    made = cli("init", "shop", cwd=tmp_path)
    assert made.code == 0
    assert made.last_line == str(tmp_path / "shop")
    assert "profile check" in made.out
    listed = cli("--workspace", "shop", "run", "list", cwd=tmp_path)
    assert (listed.code, listed.err) == (0, "")
    assert listed.out.startswith("No run yet")
    assert cli("profile", "list", "--workspace", tmp_path / "shop", cwd="/").out.startswith("No profile yet")


@pytest.mark.real_programs
def test_run_from_submit_to_deployed_by_commands_alone(client: Client, tell_for_real: Tell) -> None:
    tell = tell_for_real
    data = a_jsonl(client.workspace.root / "data.jsonl")
    assert "✓" in tell("profile", "check", "support").out
    dataset = tell("dataset", "prepare", "support", data)
    assert dataset.last_line.startswith("ds-")
    queued = tell("run", "submit", "support", dataset.last_line)
    run_id = queued.last_line
    assert RUN_ID.match(run_id)
    assert "no worker is running" in queued.out
    plan = tell("plan", "--json").json
    assert [(planned["run"]["id"], planned["num_examples"] > 0) for planned in plan["runs"]] == [(run_id, True)]
    assert run_id in tell("plan").out

    assert work_until_idle(client, real=True).code == 0

    page = tell("run", "show", run_id).out
    for word in ("deployed", "support@v1", "Attempts", "Verdict", "promote", "heldout_loss", "History", "watching"):
        assert word in page
    shown = tell("run", "show", run_id[:10], "--json").json
    assert shown["run"]["state"] == "deployed"
    assert shown["evaluation"]["decision"] == "promote"
    assert [a["task"] for a in shown["attempts"]] == ["train", "evaluate", "deploy", "watch"]
    assert "5 steps" in tell("run", "metrics", run_id).out
    assert [p["step"] for p in tell("run", "metrics", run_id, "--json").json] == [1, 2, 3, 4, 5, 5]
    live = tell("adapter", "live", "support", "--json").json
    assert live["wanted"] == "support@v1"
    assert live["targets"][0]["observed"] == "support@v1"
    assert tell("dataset", "verify", dataset.last_line).last_line == dataset.last_line


def test_submit_and_watch_ends_with_the_run_and_its_outcome(client: Client, tell_for_real: Tell) -> None:
    tell = tell_for_real
    data = a_jsonl(client.workspace.root / "data.jsonl")
    worker = start_worker(client)
    try:
        slow = ("--set", "trainer.options.steps=40", "--set", "trainer.options.step_s=0.05")  # long enough to be seen
        good = tell("run", "submit", "support", data, "--watch", *slow)
        bad = tell("run", "submit", "support", data, "--watch", "--set", "trainer.options.script=nan_weights", code=1)
        again = tell("run", "watch", bad.last_line, code=1)
    finally:
        assert stop_worker(worker) == 0
    assert client.runs.get(good.last_line).state == "deployed"
    assert "deployed: " in good.out
    assert "training" in good.err, "progress goes to stderr"
    assert client.runs.get(bad.last_line).state == "failed"
    assert again.out.splitlines()[0].startswith("failed: ")


def test_key_used_twice_makes_one_run(client: Client, tell: Tell) -> None:
    data = a_jsonl(client.workspace.root / "data.jsonl")
    first = tell("run", "submit", "support", data, "--key", "monday")
    second = tell("run", "submit", "support", data, "--key", "monday")
    other = tell("run", "submit", "support", data, "--key", "monday", "--set", "recipe.lora_rank=8", code=1)
    assert first.last_line == second.last_line
    assert "used before" in second.out
    assert "another" in other.err
    assert len(client.runs.list()) == 1


def test_campaign_override_holds_until_it_is_archived(client: Client, tell: Tell) -> None:
    campaign = tell("campaign", "create", "support", "--set", "recipe.lora_rank=8").last_line
    assert campaign.startswith("camp-")

    def explained(*more: str) -> tuple[object, str]:
        row = tell("config", "explain", "support", "recipe.lora_rank", "--json", *more).json[0]
        return row["value"], row["origin"]["layer"]

    assert explained() == (8, "campaign")
    assert explained("--set", "recipe.lora_rank=4") == (4, "override")
    tell("campaign", "create", "support", code=1)
    assert tell("campaign", "pause", "support").last_line == campaign, "by its name"
    assert explained() == (8, "campaign"), "a paused campaign opens no rounds, and keeps its overrides"
    assert tell("campaign", "resume", campaign[:9]).last_line == campaign
    assert explained() == (8, "campaign")
    assert tell("campaign", "archive", campaign).last_line == campaign
    assert explained() == (16, "default")
    assert [c["state"] for c in tell("campaign", "list", "--json").json] == ["archived"]
    assert "recipe.lora_rank=8" in tell("campaign", "show", campaign).out


def test_training_run_is_paused_resumed_and_stopped(
    client: Client, tell: Tell, worker: subprocess.Popen[bytes]
) -> None:
    run_id = submit(client, overrides={"trainer.options": SLOW})
    wait_for_state(client, run_id, "training")
    wait_for(lambda: (client.runs.progress(run_id).metrics or {}).get("loss"), what="for a loss")
    assert tell("run", "pause", run_id).last_line == run_id
    wait_for_state(client, run_id, "paused")
    assert "paused" in tell("run", "list", "--state", "paused").out
    assert tell("run", "resume", run_id).last_line == run_id
    wait_for_state(client, run_id, "training")
    assert "asked its worker to stop" in tell("run", "stop", run_id).out
    assert wait_for_state(client, run_id, "deployed", "rejected", "failed") == "deployed"
    assert "stopped early" in tell("run", "show", run_id).out


def test_waiting_runs_are_skipped_cancelled_and_tried_again(client: Client, tell: Tell) -> None:
    first, second, third = (submit(client, priority=priority) for priority in ("low", "high", "normal"))
    order = [planned["run"]["id"] for planned in tell("plan", "--json").json["runs"]]
    assert order == [second, third, first]
    assert tell("run", "skip", first).last_line == first
    assert tell("run", "cancel", second).last_line == second
    assert tell("run", "stop", "--discard", third).last_line == third
    assert [run.state for run in client.runs.list()] == ["cancelled", "cancelled", "skipped"]
    tell("run", "cancel", second, code=1)
    retried = tell("run", "retry", second).last_line
    assert client.runs.get(retried).parent_id == second
    assert "Nothing is waiting" not in tell("plan").out


def test_estop_holds_everything_and_says_so(client: Client, tell: Tell) -> None:
    run_id = submit(client)
    assert tell("estop", "show").last_line == "off"
    assert tell("estop", "on", "--reason", "fire drill").last_line == "on"
    assert "fire drill" in tell("estop", "show").out
    assert tell("estop", "show", "--json").json["is_on"] is True
    assert "e-stop is on" in tell("run", "list").out
    assert tell("estop", "off").last_line == "off"
    assert work_until_idle(client).code == 0
    assert client.runs.get(run_id).state == "deployed"


def test_held_adapter_waits_in_the_inbox_for_a_person(client: Client, tell: Tell) -> None:
    a_profile(client.workspace.root, deploy={"when": "approved"})
    held = submit(client)
    work_here(client)
    item = tell("inbox", "--json").json[0]
    assert (item["id"], item["kind"]) == (held, "held run")
    next_step = "`tunesmith adapter approve support@v1`, or `evaluate` or `reject` it"
    for words in (("inbox",), ("run", "show", held), ("run", "watch", held)):
        assert next_step in " ".join(tell(*words).out.split()), words
    assert tell("run", "show", held, "--json").json["what_to_do"] == next_step
    assert tell("adapter", "evaluate", "support@v1").last_line == held
    work_here(client)
    assert tell("adapter", "approve", "support@v1").last_line == held
    work_here(client)
    assert client.runs.get(held).state == "deployed"
    assert tell("inbox").out == "Nothing waits for you.\n"

    better = submit(client, overrides={"trainer.options.quality": 0.9})
    work_here(client)
    assert tell("adapter", "reject", "support@v2", "--reason", "not on a Friday").last_line == better
    assert client.runs.get(better).state == "rejected"
    assert "not on a Friday" in tell("run", "show", better).out
    tell("adapter", "approve", "support@v2", code=1)


def test_live_adapter_is_rolled_back_and_revoked(client: Client, tell: Tell) -> None:
    for quality in (0.2, 0.5, 0.8):
        submit(client, overrides={"trainer.options.quality": quality})
        work_here(client)
    assert [a["state"] for a in tell("adapter", "list", "--json").json] == ["live", "superseded", "superseded"]
    assert tell("adapter", "rollback", "support", "--reason", "complaints").last_line == "support@v2"
    assert "rolled_back" in tell("adapter", "rollback", "support", "--to", "support@v3", code=1).err
    adapter_id = client.adapters.show("support@v2").id
    assert tell("adapter", "revoke", "support@v2", "--reason", "leaks").last_line == adapter_id
    work_here(client)
    live = tell("adapter", "live", "support", "--json").json
    assert (live["wanted"], live["targets"][0]["observed"]) == ("support@v1", "support@v1")
    assert tell("adapter", "rollback", "support").last_line == "base"
    assert "the bare base" in tell("adapter", "live", "support").out
    assert "revoked" in tell("adapter", "show", "support@v2").out


def test_two_workers_on_one_workspace_share_the_work(client: Client) -> None:
    run_ids = [submit(client) for _ in range(4)]
    log = client.workspace.root / "second.log"
    workers = [start_worker(client, "--until-idle"), start_worker(client, "--until-idle", log=log)]
    assert [process.wait(60) for process in workers] == [0, 0]
    for run_id in run_ids:
        assert client.runs.get(run_id).state in ("deployed", "rejected")
        assert all(attempt.number == 1 for attempt in client.runs.show(run_id).attempts if attempt.task == "train")


def test_worker_for_some_kinds_leaves_the_rest(client: Client, tell: Tell) -> None:
    run_id = submit(client)
    assert work_until_idle(client, "--kinds", "train").code == 0
    assert client.runs.get(run_id).state == "evaluating"
    assert work_until_idle(client, "--kinds", "evaluate, deploy,watch").code == 0
    assert client.runs.get(run_id).state == "deployed"


def test_failed_run_shows_its_logs_and_waits_in_the_inbox(client: Client, tell: Tell) -> None:
    run_id = submit(client, overrides={"trainer.options.script": "raise"})
    assert work_until_idle(client).code == 0
    assert client.runs.get(run_id).state == "failed"
    logs = tell("run", "logs", run_id)
    assert "Traceback" in logs.out
    assert len(tell("run", "logs", run_id, "--lines", "2").out.splitlines()) == 2
    assert "failed" in tell("run", "show", run_id).out


LISTINGS = (
    "run list", "run show RUN", "run metrics RUN", "dataset list", "dataset show DATASET", "dataset verify DATASET",
    "dataset diff DATASET DATASET",
    "adapter list", "adapter show support@v1", "adapter live support", "profile list", "profile show support",
    "profile check support", "campaign list", "config explain support", "config explain support recipe",
    "plan", "plan support", "inbox", "doctor", "estop show",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A workspace with one deployed run that nobody changes any more."""
    with a_workspace(tmp_path_factory.mktemp("finished")) as client:
        run_id = submit(client)
        assert work_until_idle(client).code == 0
        return client.workspace.root, {"RUN": run_id, "DATASET": client.runs.get(run_id).dataset_id}


@pytest.mark.parametrize("line", LISTINGS)
def test_listing_speaks_json_and_plain_text(
    finished: tuple[Path, dict[str, str]], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, ids = finished
    words = ["--workspace", root, *(ids.get(word, word) for word in line.split())]
    as_json, as_text = told([*words, "--json"], 0, capsys), told(words, 0, capsys)
    assert (as_json.err, as_text.err) == ("", "")
    assert isinstance(json.loads(as_json.out), list | dict)
    assert as_text.out.strip()
    assert "\x1b" not in as_text.out, "no colours without a terminal"
    assert all(line == line.rstrip() for line in as_text.out.splitlines())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("line", ["run list", "run show RUN", "adapter list", "config explain support", "doctor"])
def test_page_fits_the_terminal_and_never_cuts_an_id(
    finished: tuple[Path, dict[str, str]], line: str, columns: int
) -> None:
    root, ids = finished
    code, shown = on_a_terminal([ids.get(word, word) for word in line.split()], root, columns)
    assert code == 0
    assert "\x1b[" in shown, "colours on a terminal"
    plain = ANSI.sub("", shown)
    assert max(len(row) for row in plain.splitlines()) <= columns
    if "run" in line:
        assert ids["RUN"] in plain


def on_a_terminal(words: list[str], cwd: Path, columns: int) -> tuple[int, str]:
    """Run the CLI with a terminal for its output; exit code and everything it drew."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = cli_environ({"TERM": "xterm-256color"})
    process = start_quickly(words, cwd=cwd, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:  # the other side has closed it
        pass
    os.close(ours)
    return process.wait(30), drawn.decode()


def test_hostile_text_cannot_steer_the_terminal(client: Client, tell: Tell) -> None:
    a_profile(client.workspace.root, "evil", description="\x1b]0;owned\x07[red]bold[/red]")
    assert tell("profile", "list").out.count("\x1b") == 0
    _, drawn = on_a_terminal(["profile", "list"], client.workspace.root, 120)
    assert "\x1b]0" not in drawn
    assert "[red]bold[/red]" in ANSI.sub("", drawn), "text is text, never markup"


def test_name_of_a_metric_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_metrics([{"attempt": "att-1", "type": "metrics", "step": 1, "\x1b[2J\0": 1.0}], 20)
    told = capsys.readouterr().out
    assert "\\x1b[2J\\x00" in told
    assert not {"\x1b", "\0"} & set(told)


def test_python_dash_m_tunesmith_is_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tunesmith", "run", "lst"],
        check=False,
        cwd=tmp_path,
        env=cli_environ(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'list'?" in done.stderr


def test_interrupt_ends_a_watch_with_130_and_no_traceback(client: Client) -> None:
    run_id = submit(client)
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith.cli.main", "run", "watch", run_id],
        cwd=client.workspace.root, env=cli_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("queued")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    told = f"the run goes on; watch again with: tunesmith run watch {run_id}\n"
    assert (process.returncode, out, err) == (130, "", told)


def test_worker_ends_in_order_on_ctrl_c(client: Client) -> None:
    run_id = submit(client, overrides={"trainer.options": SLOW})
    process = start_worker(client)
    wait_for_state(client, run_id, "training")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert client.runs.get(run_id).state == "queued"
    assert client.runs.show(run_id).attempts[0].outcome == "interrupted"


HEAVY = {"pydantic", "sqlalchemy", "alembic", "rich.console", "pyarrow", "orjson", "yaml", "torch", "tunesmith.client"}


def imported_by(*words: str, cwd: Path) -> set[str]:
    end = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tunesmith.cli.main", *words],
        cwd=cwd, env=cli_environ(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line.rpartition("|")[2].strip() for line in end.stderr.splitlines() if line.startswith("import time:")}


def test_help_is_quick_because_nothing_heavy_is_imported(tmp_path: Path) -> None:
    assert not imported_by("--help", cwd=tmp_path) & HEAVY
    took = []
    for _ in range(5):
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        assert cli("--help", cwd=tmp_path, real=True).code == 0
        after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
        took.append(min(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    assert min(took) < 0.3


def test_run_list_imports_only_what_a_listing_needs(finished: tuple[Path, dict[str, str]]) -> None:
    unwanted = {
        "alembic",
        "pyarrow",
        "orjson",
        "torch",
        "tunesmith.orchestration.lifecycle",
        "tunesmith.orchestration.worker",
        "tunesmith.stages",
    }
    assert not imported_by("run", "list", cwd=finished[0]) & unwanted
