"""Submitting twice makes one run: 64 threads with one idempotency key, through the real client, on both databases."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from support import tables
from support.workspaces import PROFILE, a_jsonl, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import Conflict
from tunesmith.store.database import Database

THREADS = 64


def _client(folder: Path, store_url: str) -> Client:
    return a_workspace(folder, settings={"store": {"url": store_url}})


def _num(database: Database, table: sa.Table) -> int:
    with database.read() as tx:
        return int(tx.conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


@pytest.mark.slow
def test_one_key_from_many_threads_makes_one_run(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, _ = client.datasets.prepare(PROFILE, [a_jsonl(tmp_path / "data.jsonl")])
        start = threading.Barrier(THREADS)

        def submit(number: int) -> tuple[str, bool]:
            start.wait()
            made = client.runs.submit(PROFILE, dataset.id, idempotency_key="one key")
            return made.id, made.is_new

        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(submit, range(THREADS)))
    assert len({run_id for run_id, _ in answers}) == 1
    assert sum(is_new for _, is_new in answers) == 1
    assert (_num(database, tables.runs), _num(database, tables.tasks)) == (1, 1)


def test_same_key_with_another_body_is_a_conflict_and_makes_nothing(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, _ = client.datasets.prepare(PROFILE, [a_jsonl(tmp_path / "data.jsonl")])
        first = client.runs.submit(PROFILE, dataset.id, idempotency_key="k")
        with pytest.raises(Conflict, match=first.id):
            client.runs.submit(PROFILE, dataset.id, idempotency_key="k", overrides=["recipe.seed=7"])
        assert client.runs.submit(PROFILE, dataset.id, idempotency_key="k").id == first.id
    assert (_num(database, tables.runs), _num(database, tables.tasks)) == (1, 1)


def test_without_a_key_every_submission_is_a_run_of_its_own(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, _ = client.datasets.prepare(PROFILE, [a_jsonl(tmp_path / "data.jsonl")])
        ids = {client.runs.submit(PROFILE, dataset.id).id for _ in range(3)}
    assert len(ids) == 3
    assert (_num(database, tables.runs), _num(database, tables.tasks)) == (3, 3)
