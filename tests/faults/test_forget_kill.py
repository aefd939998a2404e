"""Erasing that is killed at any point leaves the old dataset or the new one, and the next call finishes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.forgotten import PARTED, a_dataset_of, as_member, everything_on_disk, everything_stored
from support.quick_processes import run_code
from support.workspaces import PROFILE, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import Refused
from tunesmith.datasets.example import Split
from tunesmith.datasets.reading import verify

FORGET = """
import os, signal, sys
from tunesmith.client import Client
from tunesmith.experience.forgetting import forget

root, known, stage = sys.argv[1:]
whole = forget.finish
def on_step(step):
    if step == stage:
        os.kill(os.getpid(), signal.SIGKILL)
forget.finish = lambda *a, **k: whole(*a, **k, on_step=on_step)
if stage == "rmtree":
    def half(folder, ignore_errors=False):
        if (folder / "train.parquet").exists() and not folder.name.startswith("."):
            (folder / "train.parquet").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    forget.shutil.rmtree = half
if stage == "rename":
    os.rename = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
Client(root, actor="user:test").experiences.forget([known], reason="asked")
"""
STAGES = (
    "splits", "beside", "publish", "rename", "published", "pointed", "rmtree", "removed", "attempts", "settle",
)  # fmt: skip
"""Everything between the tombstone and the last row, in order."""


def _forgotten_by_a_killed_process(client: Client, known: str, stage: str) -> None:
    killed = run_code(FORGET, client.workspace.root, known, stage)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_kill_leaves_old_or_new_and_the_next_call_finishes(tmp_path: Path, stage: str) -> None:
    with a_workspace(tmp_path, profile=PARTED) as client:
        database = client._session.database
        dataset, examples = a_dataset_of(client, 30)
        example = examples[Split.TRAIN][0]
        known = as_member(client, database, dataset, example, Split.TRAIN)
        said = example.messages[0]["content"]
        before = client.datasets.show(dataset)[0].fingerprint
        _forgotten_by_a_killed_process(client, known, stage)
        assert said not in everything_stored(database)  # the tombstone came first, and is durable
        now = client.datasets.show(dataset)[0]
        verify(client.workspace.data_dir / now.path, now.fingerprint)  # old or new, and whole
        assert (now.fingerprint == before) == (STAGES.index(stage) < STAGES.index("pointed"))
        with pytest.raises(Refused, match="being removed"):
            client.runs.submit(PROFILE, dataset)
        (waiting,) = client.system.inbox()
        assert (waiting.kind, waiting.id) == ("erasure", dataset)
        client.system.worker().sweep()
        assert client.system.inbox() == []
        after = client.datasets.verify(dataset)
        assert (after.fingerprint == before, after.counts["train"]) == (False, len(examples[Split.TRAIN]) - 1)
        assert said.encode() not in everything_on_disk(client.workspace.datasets_dir)
        left = sorted(path.name for path in client.workspace.datasets_dir.iterdir() if path.is_dir())
        assert left == [Path(after.path).name]


def test_two_that_finish_at_once_do_it_once(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile=PARTED) as client:
        database = client._session.database
        dataset, examples = a_dataset_of(client, 30)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        _forgotten_by_a_killed_process(client, known, "splits")
        code = "import sys; from tunesmith.client import Client; Client(sys.argv[1]).system.worker().sweep()"
        words = [sys.executable, "-c", code, str(client.workspace.root)]
        racers = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        assert [racer.communicate(timeout=60)[1] for racer in racers] == [""] * 3
        client.datasets.verify(dataset)
        assert client.system.inbox() == []
        assert len(client.datasets.show(dataset)[1].earlier_fingerprints) == 1
