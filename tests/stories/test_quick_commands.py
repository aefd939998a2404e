"""Listings are quick: they import little, ask a fixed number of questions, and say the same as the ordinary way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import (
    ACTOR,
    a_claimed_run,
    a_dataset,
    a_run,
    a_task,
    an_adapter,
    an_evaluation,
    an_experience,
    claim_of,
    force,
)
from support.workspaces import an_empty_workspace, cli, cli_environ
from tunesmith.client import Client
from tunesmith.core.errors import StoreError
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.models.rules import AdapterState
from tunesmith.runs.queries import switches, tasks
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import AttemptState, ErrorClass, TaskKind, TaskState
from tunesmith.runs.spec import AdapterRef
from tunesmith.store.database import Tx
from tunesmith.store.reader import NotQuick, read_sqlite

QUICK = (("run", "list"), ("adapter", "list"), ("inbox",))
QUICK_TOO = (("dataset", "list"), ("run", "list", "--profile", "support", "--json"))
HEAVY = {
    "alembic", "fastapi", "httpx2", "orjson", "pyarrow", "pydantic", "sqlalchemy", "torch",
    "tunesmith.orchestration.worker", "tunesmith.profiles.profile", "tunesmith.runs.spec", "tunesmith.store.database",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return an_empty_workspace(tmp_path / "ws")


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    with Client(root, actor=ACTOR) as client:
        yield client


def add_runs(tx: Tx, num: int) -> None:
    """So many runs of every kind that a listing or the inbox tells something about."""
    for _ in range(num):
        dataset_id = a_dataset(tx)
        deployed = a_run(tx, RunState.DEPLOYED, dataset_id=dataset_id)
        made = an_adapter(tx, AdapterState.CANDIDATE, run_id=deployed.id)
        held = a_run(tx, RunState.HELD, dataset_id=dataset_id)
        an_evaluation(tx, held, an_adapter(tx, run_id=held.id), Decision.HOLD)
        again = AdapterRef(id=made.id, path="p", digest=made.digest)
        a_run(tx, RunState.HELD, dataset_id=dataset_id, deploys=again)
        force(tx, tables.adapters, made.id, state=AdapterState.SUPERSEDED)
        a_run(tx, RunState.PAUSED, dataset_id=dataset_id)
        queued = a_run(tx, dataset_id=dataset_id)
        a_task(tx, kind=TaskKind.TRAIN, run_id=queued.id, profile=queued.profile)
        a_failed_run(tx, dataset_id)
        an_experience(tx)


def a_failed_run(tx: Tx, dataset_id: str) -> None:
    run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN, dataset_id=dataset_id)
    tasks.end_attempt(
        tx, claim.lease, AttemptState.FAILED, actor=ACTOR, error_class=ErrorClass.CONFIG, error="Traceback\nBoom: x"
    )
    force(tx, tables.runs, run.id, state=RunState.FAILED, finished_at=tx.now)


def imported_by(words: tuple[str, ...], cwd: Path) -> set[str]:
    end = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tunesmith", *words],
        cwd=cwd, env=cli_environ(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line.rpartition("|")[2].strip() for line in end.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("words", [*QUICK, *QUICK_TOO], ids=" ".join)
def test_quick_command_imports_nothing_heavy(client: Client, root: Path, words: tuple[str, ...]) -> None:
    with client._session.database.write() as tx:
        add_runs(tx, 2)
    assert imported_by(words, root) & HEAVY == set()


@pytest.mark.parametrize(
    "ask",
    [lambda c: c.runs.list(limit=1000), lambda c: c.adapters.list(limit=1000), lambda c: c.system.inbox(),
     lambda c: c.datasets.list()],
    ids=["run list", "adapter list", "inbox", "dataset list"],
)  # fmt: skip
def test_number_of_statements_does_not_grow_with_the_runs(client: Client, ask: Callable[[Client], list[Any]]) -> None:
    database, asked = client._session.database, []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *about: asked.append(about[2]))

    def count() -> tuple[int, int]:
        asked.clear()
        return len(ask(client)), len(asked)

    with database.write() as tx:
        add_runs(tx, 5)
    num, few = count()
    with database.write() as tx:
        add_runs(tx, 45)
    many, same = count()
    assert many >= 5 * num
    assert same == few < 25


def test_store_that_was_not_opened_is_listed_as_one_that_was(client: Client, root: Path) -> None:
    with client._session.database.write() as tx:
        add_runs(tx, 3)
        switches.turn(tx, switches.ESTOP, True, actor=ACTOR, reason="a drill")
    with Client(root, actor=ACTOR) as fresh:
        listed = (fresh.runs.list(), fresh.adapters.list(), fresh.system.inbox(), fresh.datasets.list())
        assert fresh._session._database is None, "nothing of this opens the store"
    assert listed == (client.runs.list(), client.adapters.list(), client.system.inbox(), client.datasets.list())
    runs, adapters, inbox, _ = listed
    assert len(runs) == 7 * 3 - 3
    assert {item.kind for item in inbox} == {"held run", "paused run", "failed run"}
    assert {item.error for item in inbox if item.kind == "failed run"} == {"Boom: x"}
    assert {run.adapter for run in runs if run.state == "held"} == {adapter.name for adapter in adapters}
    assert {run.waits_for for run in runs if run.state == "queued"} == {
        "the e-stop is on; `tunesmith estop off` lets it go on"
    }


def test_place_in_the_queue_is_counted_for_every_run(client: Client) -> None:
    with client._session.database.write() as tx:
        queued = [a_run(tx) for _ in range(3)]
        for run in queued:
            a_task(tx, kind=TaskKind.TRAIN, run_id=run.id, profile=run.profile)
        leased = claim_of(tx, a_task(tx, TaskState.WAITING, TaskKind.EXPORT))
        tx.run(tables.workers.insert().values(
            id="wk", host="h", process="p", kinds=["train"], started_at=tx.now, seen_clock=tx.lease_clock,
            seen_until=tx.lease_now + 60,
        ))  # fmt: skip
    assert leased.task.state is TaskState.LEASED
    assert [client.runs.get(run.id).waits_for for run in queued] == [
        "a worker will take it within moments", "1 task before it in the queue", "2 tasks before it in the queue",
    ]  # fmt: skip


def test_listing_says_how_many_it_does_not_show(client: Client, root: Path) -> None:
    with client._session.database.write() as tx:
        for _ in range(3):
            an_adapter(tx)
    for words in (("run", "list"), ("adapter", "list")):
        some = cli(*words, "--limit", "2", cwd=root)
        assert (some.code, some.err) == (0, "the newest 2 of 3; --limit 3 shows all\n")
        assert len(some.out.splitlines()) == 3
        assert cli(*words, "--limit", "3", cwd=root).err == ""
        assert cli(*words, "--limit", "2", "--json", cwd=root).err == ""


def test_json_of_listings_keeps_its_keys_and_their_order(client: Client, root: Path) -> None:
    with client._session.database.write() as tx:
        add_runs(tx, 1)
    run, adapter, item = (cli(*words, "--json", cwd=root).json[0] for words in QUICK)
    assert list(run) == [
        "id", "profile", "state", "reason", "waits_for", "priority", "trainer", "method", "dataset_id", "campaign_id",
        "parent_id", "adapter", "adapter_state", "created_at", "created_by", "finished_at",
    ]  # fmt: skip
    assert list(adapter) == [
        "id", "name", "profile", "version", "state", "run_id", "run_state", "digest", "path", "metrics", "created_at",
        "targets", "events", "evaluation",
    ]  # fmt: skip
    assert list(item) == [
        "kind", "id", "profile", "since", "reason", "what_to_do", "log", "error", "num", "newest",
    ]  # fmt: skip
    assert json.dumps(run["priority"]) == '"normal"'


@pytest.mark.parametrize("damage", ["missing", "empty", "newer", "broken"])
def test_store_that_is_not_sound_is_refused_as_ever(client: Client, root: Path, damage: str) -> None:
    with client._session.database.write() as tx:
        a_run(tx)
    client.close()
    file = client.workspace.store_file
    if damage == "newer":
        with client._session.database.write() as tx:
            tx.execute("UPDATE alembic_version SET version_num = '9999'")
        client.close()
    elif damage == "broken":
        file.write_bytes(b"SQLite format 3\x00" + b"\x07" * 4096)
    else:
        file.unlink()
        if damage == "empty":
            file.write_bytes(b"")
    with Client(root) as fresh, pytest.raises(StoreError) as quick:
        fresh.runs.list()
    with Client(root) as fresh, pytest.raises(StoreError) as ordinary:
        _ = fresh._session.database
    assert quick.value.message == ordinary.value.message


def test_reader_changes_nothing(client: Client) -> None:
    with client._session.database.write() as tx:
        a_run(tx)
    with pytest.raises(NotQuick), read_sqlite(client.workspace.store_file) as reader:
        reader.rows("DELETE FROM runs")
    assert len(client.runs.list()) == 1
