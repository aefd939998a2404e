"""`run submit --dry-run`: what a run would be refused or fail for, known at once; nothing queued, made or reserved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.forgotten import add
from support.native import a_micro_base, small_rows
from support.rows import dump
from support.workspaces import PROFILE, a_workspace, cli
from tunesmith.client import Client
from tunesmith.core.errors import DataError, Refused, UsageError
from tunesmith.store.database import Database
from tunesmith.store.schema import open_store

POLICY = {"experience": {"mix": {"min_new": 5}}, "recipe": {"max_length": 64}}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path, profile=POLICY) as made:
        yield made


def _rows(client: Client, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    file = client.workspace.root / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _pairs(num: int, words: int = 3) -> list[dict[str, str]]:
    return [{"prompt": f"Question {n}", "completion": f"Answer {n} " + "word " * words} for n in range(num)]


def _folders(client: Client) -> list[str]:
    folder = client.workspace.datasets_dir
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _database(client: Client) -> Database:
    return open_store(f"sqlite:///{client.workspace.data_dir / 'store.db'}")


@pytest.mark.parametrize("source", ["files", "experiences", "dataset"])
def test_dry_run_leaves_everything_as_it_was(client: Client, source: str) -> None:
    for n in range(60):
        add(client, f"Where does order {n} go?", f"To place {n}.")
    file = _rows(client, _pairs(60))
    dataset, _ = client.datasets.prepare(PROFILE, [file])
    data = {"files": [str(file)], "experiences": [], "dataset": [dataset.id]}[source]
    states, folders = client.experiences.stats(PROFILE)[0].states, _folders(client)
    with closing(_database(client)) as database:
        before = dump(database)
    told = cli("run", "submit", PROFILE, *data, "--dry-run", cwd=client.workspace.root)
    assert told.code == 0, told.err
    assert "nothing wrong: sim would train" in told.out
    assert "Nothing was queued, made or reserved." in told.out
    with closing(_database(client)) as database:
        assert dump(database) == before
    assert (client.runs.list(), _folders(client)) == ([], folders)
    assert client.experiences.stats(PROFILE)[0].states == states
    assert not client.profiles.check(PROFILE).lock.is_split_decided


def test_dry_run_refuses_what_submitting_would_refuse(client: Client) -> None:
    with pytest.raises(Refused, match="no experience to assemble"):
        client.profiles.dry_run(PROFILE)
    for n in range(60):
        add(client, f"Where does order {n} go?", f"To place {n}.")
    first = client.runs.submit(PROFILE)
    client.runs.skip(first.id)
    second, _ = client.datasets.assemble(PROFILE)
    for verb in (client.profiles.dry_run, client.runs.submit):
        with pytest.raises(Refused, match=f"of the experiences of dataset .* are in {second.id} by now"):
            verb(PROFILE, first.dataset_id)
    with pytest.raises(UsageError, match="needs a dataset that is there"):
        client.runs.submit(PROFILE, dry_run=True)


def test_dry_run_looks_at_lengths_as_the_training_does(tmp_path: Path) -> None:
    profile = {
        "base": {"path": "models/micro", "family": "llama"},
        "recipe": {"max_length": 64},
        "gate": {"min_cases": 2},
    }
    with a_workspace(tmp_path, "native", profile=profile) as client:
        a_micro_base(client.workspace.root / "models" / "micro")
        long = _rows(client, _pairs(40, words=400), "long.jsonl")
        with pytest.raises(DataError, match=r"none of its \d+ training examples fits into 64 tokens") as refused:
            client.profiles.dry_run(PROFILE, long)
        assert "raise recipe.max_length" in str(refused.value)
        some = _rows(client, [*small_rows(40), *_pairs(10, words=400)], "some.jsonl")
        warnings = client.profiles.dry_run(PROFILE, some).warnings
        assert any("longer than 64 tokens and were dropped whole" in each for each in warnings), warnings
        assert (client.runs.list(), client.datasets.list()) == ([], [])
