"""The database: SQLite or PostgreSQL; transactions, lease time, and what stops it from being used."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite

from tunesmith import clock
from tunesmith.disk import is_disk_trouble
from tunesmith.errors import MissingExtra, StoreCorrupt, StoreError, UsageError
from tunesmith.store.reserve import Reserve

_BUSY_S = 60.0
_IDLE_S = 5.0
_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "glusterfs"})
_TRUSTED_S = 0.1  # a connection used a moment ago needs no ping
_JOURNAL, _DURABLE, _USED_AT = "journal", "durable", "used_at"  # what we remember about a connection
_CORRUPT = ("malformed", "not a database", "disk image", "corrupt")
_DATABASE_CLOCK = "database"
BOOT_SECONDS = "tunesmith_boot_seconds"
"""Lease time as a function inside SQLite; PostgreSQL has its own clock."""


@dataclass
class Tx:
    """One transaction: a connection, the instant it began, and the clock that leases are measured on."""

    conn: sa.Connection
    now: datetime

    @cached_property
    def is_postgres(self) -> bool:
        return self.conn.dialect.name == "postgresql"

    @cached_property
    def lease_clock(self) -> str:
        """Which clock lease times are on; a lease on another clock (another boot) has expired."""
        return _DATABASE_CLOCK if self.is_postgres else clock.boot_id()

    @cached_property
    def lease_now(self) -> float:
        """Database time on PostgreSQL, boot time on SQLite: wall-clock jumps on a worker's machine steal nothing."""
        if not self.is_postgres:
            return clock.boot_seconds()
        return float(self.conn.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())

    def all(self, statement: sa.Executable) -> list[sa.RowMapping]:
        return list(self.conn.execute(statement).mappings())

    def first(self, statement: sa.Executable) -> sa.RowMapping | None:
        return self.conn.execute(statement).mappings().first()

    def run(self, statement: sa.Executable) -> int:
        """Execute a write and say how many rows it touched."""
        return int(self.conn.execute(statement).rowcount)

    def add_once(self, table: sa.Table, **values: Any) -> bool:
        """Insert a row unless it is there already; False: somebody else was first."""
        insert = postgresql.insert(table) if self.is_postgres else sqlite.insert(table)
        added = sa.literal_column("1", sa.Integer)
        return self.first(insert.values(**values).on_conflict_do_nothing().returning(added)) is not None

    def put(self, table: sa.Table, key: dict[str, Any], **values: Any) -> None:
        """Make the row with this key hold these values, whether it is there or not."""
        update = table.update().where(*(table.c[name] == value for name, value in key.items())).values(**values)
        if not self.run(update) and not self.add_once(table, **key, **values):
            self.run(update)

    def execute(self, text: str, parameters: Any = ()) -> Any:
        """Hand finished SQL to the driver and return its cursor; errors look as they do everywhere else."""
        try:
            return self._cursor.execute(text, parameters)
        except self._driver.Error as error:
            dialect = self.conn.dialect
            is_lost = dialect.is_disconnect(error, self.conn.connection.dbapi_connection, self._cursor)
            if is_lost:
                self.conn.invalidate(error)
            raise exc.DBAPIError.instance(
                text, None, error, self._driver.Error, connection_invalidated=is_lost, dialect=dialect
            ) from error

    @cached_property
    def _cursor(self) -> Any:
        return self.conn.connection.cursor()

    @property
    def _driver(self) -> Any:
        return self.conn.dialect.loaded_dbapi


class Database:
    """Opened once per process. Every writing transaction takes the write lock at its start."""

    def __init__(self, engine: sa.Engine, where: str) -> None:
        self.engine = engine
        self.where = where
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._reader = engine
        if not self._is_sqlite:
            self._reader = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._file: tuple[int, int] | None = None
        self._reopen: Callable[[], None] | None = None
        self._following = threading.Lock()
        self.reserve = Reserve(Path(where)) if self._is_sqlite else None

    def follow_file(self, reopen: Callable[[], None]) -> None:
        """From now on notice that the file was moved away or replaced; `reopen` raises where the new one is no store.

        A process that went on with the file it once opened would keep what nobody else ever sees.
        """
        if self._is_sqlite:
            self._file, self._reopen = _identity(self.where), reopen

    def _look_at_file(self) -> None:
        if self._reopen is None or self._file == _identity(self.where) is not None:
            return
        with self._following:
            found = _identity(self.where)
            if self._file == found is not None:
                return  # another thread was quicker
            self._file = None
            self.engine.dispose()
            if found is None:
                raise StoreError(f"the store {self.where} is missing, but this workspace had one; restore a backup")
            self._reopen()
            self._file = found

    @contextmanager
    def write(self, *, durable: bool = True, bulk: bool = False) -> Iterator[Tx]:
        """All of it or nothing; on SQLite the lock is taken at BEGIN, so nothing fails half-way for being busy.

        `durable=False` is for leases: SQLite then leaves it to the next durable commit to reach the disk. Nothing is
        lost with a process, and with the machine's power every lease is lost anyway. `bulk=True` is for what people say
        and what is made of it: it is refused on a disk that is nearly full, where control must go on.
        """
        self._look_at_file()
        is_low = self._make_room(bulk)
        with self._errors(), self.engine.connect() as conn, conn.begin():
            tx = Tx(conn, clock.utc_now())
            if self._is_sqlite:
                self._synchronise(tx, durable)
                tx.execute("BEGIN IMMEDIATE")
                tx.now = clock.utc_now()  # we may have waited for the lock
            yield tx
        if is_low:
            self._fold_log()

    @contextmanager
    def read(self) -> Iterator[Tx]:
        """A consistent view; writes nothing."""
        self._look_at_file()
        self._make_room(bulk=False)  # SQLite makes its log and index anew for the first reader
        with self._errors(), self._reader.connect() as conn, conn.begin():
            tx = Tx(conn, clock.utc_now())
            if self._is_sqlite:
                tx.execute("BEGIN")
            yield tx

    def _make_room(self, bulk: bool) -> bool:
        """Before a write on a nearly full disk: a piece of the reserve goes, and bulk is refused. Whether it is so."""
        if self.reserve is None:
            return False
        standing = self.reserve.before_write(bulk=bulk)
        if standing.refusal is not None:
            raise StoreError(f"{standing.refusal}; free some space, then try again")
        return standing.is_low

    def _fold_log(self) -> None:
        """Move the write-ahead log into the store, so that its space is used again instead of growing."""
        with suppress(exc.DBAPIError), self.engine.connect() as conn:
            conn.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def _synchronise(self, tx: Tx, durable: bool) -> None:
        known = tx.conn.connection.info
        if known[_JOURNAL] == "WAL" and known.get(_DURABLE, True) != durable:
            tx.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
            known[_DURABLE] = durable

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except exc.IntegrityError:
            raise  # the caller knows what it means
        except exc.DBAPIError as error:
            if self.reserve is not None and is_disk_trouble(error):
                self.reserve.release()  # a quota shows only in the error; the next try finds room
            raise _translated(error, self.where) from error

    def close(self) -> None:
        self.engine.dispose()


def connect(url: str) -> Database:
    """A database without looking into it; `store.schema.open_store` also checks its version."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return Database(_sqlite_engine(parsed), str(parsed.database))
    return Database(_postgres_engine(parsed), parsed.render_as_string(hide_password=True))


def _parse(url: str) -> sa.URL:
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


def sqlite_module() -> ModuleType:
    """The SQLite that is linked in: pysqlite3 where installed (no WAL-reset bug), else the standard library's."""
    try:
        return importlib.import_module("pysqlite3.dbapi2")
    except ImportError:
        return importlib.import_module("sqlite3.dbapi2")


def wal_is_safe(version: tuple[int, ...]) -> bool:
    """Older releases can drop committed pages when a WAL restarts; three branches carry the fix."""
    return version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    path = Path(str(url.database)).resolve()
    _refuse_network_file_system(path)
    module = sqlite_module()
    engine = sa.create_engine(
        url.set(drivername="sqlite+pysqlite"),
        module=module,
        connect_args={"timeout": _BUSY_S, "isolation_level": None, "check_same_thread": False},
        poolclass=sa.pool.QueuePool,
        pool_size=4,
        max_overflow=64,
    )
    journal = "WAL" if wal_is_safe(module.sqlite_version_info) else "DELETE"

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
        _switch_journal(cursor, journal)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA wal_autocheckpoint = 4000")  # pages; less often, and 16 MB take far less than a second
        cursor.execute("PRAGMA cache_size = -16000")  # 16 MB: the inner pages of indexes over millions of rows
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA secure_delete = ON")  # what is deleted or moved becomes zeros: forgotten means gone
        cursor.close()
        connection.create_function(BOOT_SECONDS, 0, _boot_seconds)
        record.info[_JOURNAL] = journal

    return engine


def _identity(path: str) -> tuple[int, int] | None:
    """Which file that is now; None: there is none."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _boot_seconds() -> float:
    return clock.boot_seconds()


def _switch_journal(cursor: Any, journal: str) -> None:
    """Changing the journal mode does not honour the busy timeout, so wait for the others here."""
    deadline = time.monotonic() + _BUSY_S
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


def _refuse_network_file_system(path: Path) -> None:
    kind = file_system_of(path, _mounts())
    if kind in _NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} is on a network file system ({kind}), where SQLite loses data; "
            "put the workspace on a local disk or set store.url to a PostgreSQL database"
        )


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text()
    except OSError:  # not Linux
        return ""


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system a path is on, by the kernel's list of mounts; empty where there is none."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, written, fs_type, *_ = line.split(" ")
        mount = written.replace(r"\040", " ")  # how the kernel writes a space
        inside = path == Path(mount) or Path(mount) in path.parents
        if inside and len(mount) >= len(best):
            best, kind = mount, fs_type
    return kind


def _postgres_engine(url: sa.URL) -> sa.Engine:
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


def broke(error: exc.IntegrityError, index: str, column: str) -> bool:
    """Whether it was this unique index that refused: PostgreSQL names the index, SQLite its columns."""
    text = str(error.orig)
    return f'"{index}"' in text or f"UNIQUE constraint failed: {column}" in text


def _translated(error: exc.DBAPIError, where: str) -> Exception:
    """What a user can act on."""
    text = str(error.orig)
    first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if any(word in text for word in _CORRUPT):
        return StoreCorrupt(
            f"the store {where} is damaged ({first_line}); nothing was changed. Restore a backup, or copy the file "
            "away and recover it with sqlite3's .recover"
        )
    if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError):
        hint = "is the disk full or read-only?" if os.path.isabs(where) else "is the server running?"
        return StoreError(f"the store {where} cannot be used: {first_line}; {hint}")
    return error
