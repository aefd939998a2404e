"""What people see of a run while it trains or waits, through the command line and a real worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.workspaces import a_workspace, cli, start_worker, stop_worker, submit, wait_for
from tunesmith.client.attempt_progress import read_progress


def test_run_show_tells_step_loss_and_time_left_while_it_trains(tmp_path: Path) -> None:
    with a_workspace(tmp_path, options={"steps": 600, "step_s": 0.1}) as client:
        run_id = submit(client, overrides=["recipe.max_steps=600"])
        worker = start_worker(client)
        try:
            wait_for(lambda: client.runs.progress(run_id).left_s, what="a pace")
            page = cli("run", "show", run_id, cwd=client.workspace.root).out
        finally:
            stop_worker(worker)
    assert re.search(r"now +train · step \d+ of 600 · loss [\d.]+ .*about .* left", page), page
    assert "at most 600 steps (max_steps), within 3 epochs" in page


def test_piped_watch_tells_of_a_retry_once_not_at_every_look(tmp_path: Path) -> None:
    options = {"script": "fail", "error_class": "transient"}
    with a_workspace(tmp_path, options=options) as client:
        run_id = submit(client)
        worker = start_worker(client)
        try:
            ended = cli("run", "watch", run_id, cwd=client.workspace.root)
        finally:
            stop_worker(worker)
        num_attempts = len(client.runs.show(run_id).attempts)
    told = [line for line in ended.err.splitlines() if "tried again in" in line]
    assert ended.code == 1
    assert 1 <= len(told) <= num_attempts


@pytest.mark.parametrize(
    ("status", "events"),
    [
        ("", ""),
        ("[]", ""),
        ('{"phase": "train", "done": "x"}', ""),
        ('{"phase": "train", "done": 1, "total": 9, "unit": "step"}', '{"type": "metrics", "values": 3}\n[]\n'),
        (
            '{"phase": "train", "done": 1, "total": 9, "unit": "step"}',
            '{"type": "metrics", "values": {"loss": 1.0}, "step": 1, "at": 5.0}\n' * 2,
        ),
    ],
)  # fmt: skip
def test_odd_files_of_a_program_give_no_time_and_no_error(tmp_path: Path, status: str, events: str) -> None:
    (tmp_path / "status.json").write_text(status)
    (tmp_path / "events.jsonl").write_text(events)
    seen = read_progress(tmp_path)
    assert seen is None or seen.left_s is None


def test_version_is_told(tmp_path: Path) -> None:
    assert re.fullmatch(r"tunesmith \d+\.\d+\.\d+\n", cli("--version", cwd=tmp_path).out)


def test_plan_without_data_gives_a_time(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        root = client.workspace.root
        assert "for each 1,000 examples at most" in cli("plan", "support", cwd=root).out
        submit(client)
        assert re.search(
            r"data .*the newest \(none given\).*\ntraining +about \d+ step", cli("plan", "support", cwd=root).out
        )


def test_init_takes_its_folder_from_workspace_too(tmp_path: Path) -> None:
    made = cli("init", "--workspace", "there", cwd=tmp_path)
    assert (made.code, made.last_line) == (0, str(tmp_path / "there"))
    assert cli("demo", "one", "--workspace", "two", cwd=tmp_path).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("org/model-7b", "tunesmith base fetch org/model-7b --to models/model-7b"),
        ("model.gguf", "is a GGUF file, which cannot be trained"),
        ("tunesmith.yaml", "is a file; base.path must be the folder of a model in Hugging Face format"),
    ],
)
def test_base_that_is_no_folder_says_what_is_wanted(tmp_path: Path, path: str, told: str) -> None:
    with a_workspace(tmp_path) as client:
        root = client.workspace.root
    (root / "model.gguf").touch()
    profile = root / "profiles" / "support.yaml"
    profile.write_text(re.sub(r"path: .*", f"path: {path}", profile.read_text(), count=1))
    ended = cli("profile", "check", "support", cwd=root)
    assert (ended.code, told in ended.err) == (1, True), ended.err
