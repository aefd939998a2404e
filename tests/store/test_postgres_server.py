"""The PostgreSQL server: lost connections and restarts are StoreErrors, and then everything works again."""

from __future__ import annotations

import threading
import time

import pytest
import sqlalchemy as sa

from support import tables
from support.databases import Postgres
from support.rows import ALL_KINDS, WORKER, a_task, claim_of, dump
from support.store_processes import broken_invariants, create_store, end_all, fail_then_add, start
from tunesmith.core.errors import StoreError, StoreTooNew
from tunesmith.runs.queries import tasks
from tunesmith.runs.rules.task import AttemptState
from tunesmith.store.database import Database, connect
from tunesmith.store.schema import HEAD, integrity_problem, open_store


def test_terminated_backend_in_mid_transaction_is_a_store_error_and_changes_nothing(
    postgres: Postgres, postgres_store: str, postgres_database: Database
) -> None:
    before = dump(postgres_database)

    def cut_amid() -> None:
        with postgres_database.write() as tx:
            a_task(tx)
            assert postgres.terminate_backends(postgres_store) >= 1
            a_task(tx)

    with pytest.raises(StoreError, match="server running"):
        cut_amid()
    assert dump(postgres_database) == before
    fail_then_add(postgres_database)


def test_backend_terminated_before_the_commit_is_a_store_error_and_changes_nothing(
    postgres: Postgres, postgres_store: str, postgres_database: Database
) -> None:
    before = dump(postgres_database)

    def cut_amid() -> None:
        with postgres_database.write() as tx:
            a_task(tx)
            postgres.terminate_backends(postgres_store)

    with pytest.raises(StoreError):
        cut_amid()
    assert dump(postgres_database) == before
    fail_then_add(postgres_database)


def test_connections_cut_while_they_lay_idle_are_replaced_unnoticed(
    postgres: Postgres, postgres_store: str, postgres_database: Database
) -> None:
    fail_then_add(postgres_database)
    assert postgres.terminate_backends(postgres_store) >= 1
    time.sleep(0.15)  # past the moment for which a connection is trusted
    fail_then_add(postgres_database)


def test_restarted_server_loses_nothing_committed_and_no_lease(postgres: Postgres, postgres_database: Database) -> None:
    with postgres_database.write() as tx:
        claim = claim_of(tx, a_task(tx))
    before = dump(postgres_database)
    postgres.restart()
    time.sleep(0.15)
    assert dump(postgres_database) == before
    with postgres_database.write() as tx:
        tasks.renew(tx, claim.lease, 30.0)
        tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER)
    assert broken_invariants(postgres_database) == []


def test_stopped_server_is_a_store_error_until_it_is_back(postgres: Postgres, postgres_database: Database) -> None:
    fail_then_add(postgres_database)
    postgres.stop()
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match="is the server running"):
                fail_then_add(postgres_database)
    finally:
        postgres.start()
    fail_then_add(postgres_database)


def test_backends_terminated_again_and_again_under_load_break_no_invariant(
    postgres: Postgres, postgres_store: str, postgres_database: Database
) -> None:
    """Four threads work on, patiently; whatever was acknowledged is there in the end."""
    acknowledged: list[str] = []
    over = threading.Event()
    unexpected: list[BaseException] = []

    def work(number: int) -> None:
        while not over.is_set():
            try:
                with postgres_database.write() as tx:
                    task_id = a_task(tx)
                acknowledged.append(task_id)
                with postgres_database.write() as tx:
                    claim = tasks.claim(tx, f"wk-{number}", ALL_KINDS, 30.0)
                if claim is not None:
                    with postgres_database.write() as tx:
                        tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=f"wk-{number}")
            except StoreError:
                continue
            except BaseException as error:
                unexpected.append(error)
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        time.sleep(0.1)
        postgres.terminate_backends(postgres_store)
    over.set()
    for thread in threads:
        thread.join(30)
    assert unexpected == []
    time.sleep(0.15)  # past the moment for which a connection is trusted
    with postgres_database.read() as tx:
        kept = {row["id"] for row in tx.all(sa.select(tables.tasks.c.id))}
    assert len(acknowledged) > 0
    assert set(acknowledged) <= kept
    assert broken_invariants(postgres_database) == []


def test_frozen_transaction_is_ended_by_the_server_so_that_others_can_take_over(postgres_database: Database) -> None:
    """A worker that was stopped inside a transaction must not keep its task's row locked for ever."""
    with postgres_database.read() as tx:
        timeout = tx.execute("SHOW idle_in_transaction_session_timeout").fetchone()[0]
        commit = tx.execute("SHOW synchronous_commit").fetchone()[0]
    assert timeout.endswith("s")
    assert 0 < int(timeout[:-1]) <= 10
    assert commit == "on"


def test_empty_database_is_refused_without_create(postgres: Postgres) -> None:
    url = postgres.create("empty_one")
    try:
        with pytest.raises(StoreError, match="empty"):
            open_store(url)
        database = connect(url)
        with database.read() as tx:
            assert sa.inspect(tx.conn).get_table_names() == []
        database.close()
    finally:
        postgres.drop("empty_one")


def test_four_processes_creating_the_same_store_make_one(postgres: Postgres) -> None:
    url = postgres.create("created_at_once")
    try:
        assert end_all([start(create_store, url) for _ in range(4)], 60) == [0] * 4
        database = open_store(url)
        fail_then_add(database)
        assert integrity_problem(database) is None
        database.close()
    finally:
        postgres.drop("created_at_once")


def test_newer_store_is_refused(postgres: Postgres, postgres_store: str, postgres_database: Database) -> None:
    with postgres_database.write() as tx:
        tx.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreTooNew, match=f"9999.*{HEAD}"):
        open_store(postgres.url(postgres_store))


def test_database_of_another_program_is_refused(postgres: Postgres) -> None:
    url = postgres.create("songs")
    try:
        database = connect(url)
        with database.write() as tx:
            tx.execute("CREATE TABLE songs (title TEXT)")
        database.close()
        with pytest.raises(StoreError, match="another program's tables"):
            open_store(url, create=True)
    finally:
        postgres.drop("songs")


@pytest.mark.parametrize("name", ["no_such_database"])
def test_unreachable_database_says_so_without_the_password(postgres: Postgres, name: str) -> None:
    url = postgres.url(name).replace("postgres:@", "postgres:hunter2@", 1)
    with pytest.raises(StoreError, match="cannot be used") as refusal:
        open_store(url)
    assert "hunter2" not in str(refusal.value)


def test_postgres_forms_of_the_url_mean_the_same(postgres: Postgres, postgres_store: str) -> None:
    url = postgres.url(postgres_store)
    for form in (
        url,
        url.replace("postgresql://", "postgres://"),
        url.replace("postgresql://", "postgresql+psycopg://"),
    ):
        open_store(form).close()
