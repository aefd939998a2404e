"""Connections to SQLite and PostgreSQL, set up so that a commit is durable and nothing waits for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from tunesmith.core import clock
from tunesmith.core.errors import MissingExtra, UsageError
from tunesmith.store.sqlite_files import refuse_unusable
from tunesmith.store.sqlite_library import journal_of, sqlite_module

JOURNAL = "journal"
"""What a SQLite connection's info remembers: the journal mode."""
BOOT_SECONDS = "tunesmith_boot_seconds"
"""Lease time as a function inside SQLite; PostgreSQL has its own clock."""
_IDLE_S = 5.0
_TRUSTED_S = 0.1  # a connection used a moment ago needs no ping
_USED_AT = "used_at"


def parse_url(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
        backend = parsed.get_backend_name()
    except (exc.ArgumentError, ValueError) as error:
        raise UsageError("store.url is not a database URL; use sqlite:///path or postgresql://host/name") from error
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise UsageError(f"store.url: {backend} is not supported; use sqlite:///path or postgresql://host/name")


def sqlite_engine(url: sa.URL, patience_s: float) -> sa.Engine:
    refuse_unusable(Path(str(url.database)))
    module = sqlite_module()
    engine = sa.create_engine(
        url.set(drivername="sqlite+pysqlite"),
        module=module,
        connect_args={"timeout": patience_s, "isolation_level": None, "check_same_thread": False},
        poolclass=sa.pool.QueuePool,
        pool_size=4,
        max_overflow=64,
    )
    journal = journal_of(module)

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(patience_s * 1000)}")
        _switch_journal(cursor, journal, patience_s)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA wal_autocheckpoint = 4000")  # pages; less often, and 16 MB take far less than a second
        cursor.execute("PRAGMA cache_size = -16000")  # 16 MB: the inner pages of indexes over millions of rows
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA secure_delete = ON")  # what is deleted or moved becomes zeros: forgotten means gone
        cursor.close()
        connection.create_function(BOOT_SECONDS, 0, _boot_seconds)
        record.info[JOURNAL] = journal

    return engine


def _boot_seconds() -> float:
    return clock.boot_seconds()


def _switch_journal(cursor: Any, journal: str, patience_s: float) -> None:
    """Changing the journal mode does not honour the busy timeout, so wait for the others here."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if cursor.execute("PRAGMA journal_mode").fetchone()[0].upper() == journal:
                return
            cursor.execute(f"PRAGMA journal_mode = {journal}")
            return
        except Exception as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def postgres_engine(url: sa.URL) -> sa.Engine:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtra.named("postgres", "a PostgreSQL store") from None
    engine = sa.create_engine(url, pool_size=4, max_overflow=64)

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET synchronous_commit = on")
            # a worker that freezes inside a transaction must not keep others from taking over its task
            cursor.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_S:g}s'")
        connection.commit()

    @sa.event.listens_for(engine, "checkin")
    def _put_away(connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    @sa.event.listens_for(engine, "checkout")
    def _is_alive(connection: Any, record: Any, proxy: Any) -> None:
        """The server may have been restarted while a connection lay in the pool; a fresh one is taken then."""
        if time.monotonic() - record.info.get(_USED_AT, 0.0) < _TRUSTED_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise exc.DisconnectionError from error

    return engine
