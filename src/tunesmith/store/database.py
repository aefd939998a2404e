"""The database: SQLite or PostgreSQL; transactions, lease time, and what stops it from being used."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import sqlite

from tunesmith.core import clock
from tunesmith.core.disk import is_disk_trouble
from tunesmith.core.errors import StoreBusy, StoreCorrupt, StoreError
from tunesmith.store.connections import JOURNAL, parse_url, postgres_engine, sqlite_engine
from tunesmith.store.lock_holder import Holder, Patience, find_holder
from tunesmith.store.reader import postgres_json_text, sqlite_json_text
from tunesmith.store.reserve import Reserve
from tunesmith.store.sqlite_files import CommitMark, FilesInUse, identity

T = TypeVar("T")
_SLICE_S = 3.0  # after each so many seconds of waiting for the write lock, look who holds it
_DURABLE, _WAITS = "durable", "waits"  # what we remember about a connection
_CORRUPT = ("malformed", "not a database", "disk image", "corrupt")
_DATABASE_CLOCK = "database"
STOP_SIGNALS = frozenset({signal.SIGTSTP, signal.SIGTTOU, signal.SIGTTIN})
"""Ctrl-Z, and use of a terminal that another program has. SIGSTOP cannot be blocked."""


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

    def rows(self, text: str, **values: Any) -> Sequence[Any]:
        """The rows of SQL text with named parameters; JSON and instants are as the driver gives them."""
        return list(self.conn.execute(sa.text(text), values).mappings())

    def json_text(self, column: str, *path: str) -> str:
        """SQL for the text at a path inside a JSON column."""
        return postgres_json_text(column, path) if self.is_postgres else sqlite_json_text(column, path)

    def first(self, statement: sa.Executable) -> sa.RowMapping | None:
        return self.conn.execute(statement).mappings().first()

    def run(self, statement: sa.Executable) -> int:
        """Execute a write and say how many rows it touched."""
        return int(self.conn.execute(statement).rowcount)

    def insert_if_absent(self, table: sa.Table, **values: Any) -> bool:
        """Insert a row unless it exists already; return whether it was inserted."""
        if self.is_postgres:
            from sqlalchemy.dialects import postgresql

            insert: sqlite.Insert | postgresql.Insert = postgresql.insert(table)
        else:
            insert = sqlite.insert(table)
        added = sa.literal_column("1", sa.Integer)
        return self.first(insert.values(**values).on_conflict_do_nothing().returning(added)) is not None

    def upsert(self, table: sa.Table, key: dict[str, Any], **values: Any) -> None:
        """Update the row with this key, or insert it."""
        update = table.update().where(*(table.c[name] == value for name, value in key.items())).values(**values)
        if not self.run(update) and not self.insert_if_absent(table, **key, **values):
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

    def close(self) -> None:
        """Let go of the driver's cursor while the connection is still ours.

        A cursor that is dropped later resets its statement in the middle of what the connection does for the next
        thread. The driver holds the interpreter's lock meanwhile: all threads stand still, or the process crashes.
        """
        cursor = self.__dict__.pop("_cursor", None)
        if cursor is not None:
            with suppress(self._driver.Error):
                cursor.close()

    @cached_property
    def _cursor(self) -> Any:
        return self.conn.connection.cursor()

    @property
    def _driver(self) -> Any:
        return self.conn.dialect.loaded_dbapi


def patiently(
    action: Callable[[], T],
    wait: Callable[[float], bool],
    *,
    on_error: Callable[[StoreError], None] = lambda error: None,
    max_wait_s: float = 5.0,
) -> T:
    """Repeat an action while the store cannot be reached, at growing intervals; raises at once if it is damaged.

    `wait` pauses for so many seconds; True: give up, and the error is raised.
    """
    wait_s = 0.2
    while True:
        try:
            return action()
        except StoreCorrupt:
            raise
        except StoreError as error:
            on_error(error)
            if wait(wait_s):
                raise
            wait_s = min(max_wait_s, wait_s * 2)


class Database:
    """Opened once per process. Every writing transaction takes the write lock at its start."""

    def __init__(self, engine: sa.Engine, where: str, patience: Patience) -> None:
        self.engine = engine
        self.where = where
        self.patience = patience
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._reader = engine
        if not self._is_sqlite:
            self._reader = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._files: FilesInUse | None = None
        self._reopen: Callable[[], None] | None = None
        self._mark: CommitMark | None = None
        self._following = threading.Lock()
        self.reserve = Reserve(Path(where)) if self._is_sqlite else None

    def follow_files(self, reopen: Callable[[], None]) -> None:
        """From now on notice that a file was removed or replaced; `reopen` raises where the new one is no store.

        A process that went on with the files it once opened would keep what nobody else ever sees. From now on every
        durable commit is marked, too.
        """
        if self._is_sqlite:
            self._mark = CommitMark(self.where)
            with self.read() as tx:
                self._mark.check(tx)
            self._files, self._reopen = FilesInUse(self.where), reopen

    def _look_at_files(self) -> None:
        if self._reopen is not None and (self._files is None or self._files.have_changed()):
            with self._following:
                self._follow(self._reopen)

    def _follow(self, reopen: Callable[[], None]) -> None:
        if self._files is not None and not self._files.have_changed():
            return  # another thread was quicker
        if self._files is not None and self._files.log_was_removed():
            self._fold_log()  # our connections still have it: write its rows into the store
        self._files = None
        self.close()
        if identity(self.where) is None:
            raise StoreError(f"the store {self.where} is missing, but this workspace had one; restore a backup")
        reopen()
        with self._errors(), self.engine.connect():  # opens -wal and -shm
            self._mark, self._files = CommitMark(self.where), FilesInUse(self.where)

    @contextmanager
    def write(self, *, durable: bool = True, bulk: bool = False) -> Iterator[Tx]:
        """All of it or nothing; on SQLite the lock is taken at BEGIN, so nothing fails half-way for being busy.

        `durable=False` is for leases: SQLite then leaves it to the next durable commit to reach the disk. Nothing is
        lost with a process, and with the machine's power every lease is lost anyway. `bulk=True` is for what people say
        and what is made of it: it is refused on a disk that is nearly full, where control must go on.
        """
        self._look_at_files()
        is_low = self._make_room(bulk)
        with self._errors(), self.engine.connect() as conn, _Unsuspended() as unsuspended:
            with conn.begin(), closing(Tx(conn, clock.utc_now())) as tx:
                if self._is_sqlite:
                    self._synchronise(tx, durable)
                    self._take_write_lock(tx)
                    unsuspended.begin()
                    tx.now = clock.utc_now()  # we may have waited for the lock
                yield tx
                event = self._mark.last_event(tx) if durable and self._mark is not None else None
            if event is not None and self._mark is not None:
                self._mark.note(event)
        if is_low:
            self._fold_log()

    @contextmanager
    def read(self) -> Iterator[Tx]:
        """A consistent view; writes nothing."""
        self._look_at_files()
        self._make_room(bulk=False)  # SQLite makes its log and index anew for the first reader
        with self._errors(), self._reader.connect() as conn, conn.begin(), closing(Tx(conn, clock.utc_now())) as tx:
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
        if known[JOURNAL] == "WAL" and known.get(_DURABLE, True) != durable:
            tx.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
            known[_DURABLE] = durable

    def _take_write_lock(self, tx: Tx) -> None:
        """Wait as long as our patience allows; longer for a holder that runs than for one that is stopped."""
        patience, begun, is_told = self.patience, time.monotonic(), False
        while True:
            self._wait_at_most(tx, min(_SLICE_S, patience.busy_s, patience.stopped_s))
            try:
                tx.execute("BEGIN IMMEDIATE")
                break
            except exc.OperationalError as error:
                if not _is_busy(error):
                    raise
                waited_s, holder = time.monotonic() - begun, find_holder(self.where)
                is_stopped = holder is not None and holder.is_stopped
                if waited_s >= (patience.stopped_s if is_stopped else patience.busy_s):
                    raise _busy(self.where, holder, waited_s) from error
                if not is_told:
                    patience.on_wait(f"waiting for the store: {holder or 'another process'} holds its write lock")
                    is_told = True
        if tx.conn.connection.info[JOURNAL] != "WAL":  # its commit waits for readers
            self._wait_at_most(tx, patience.busy_s)

    def _wait_at_most(self, tx: Tx, seconds: float) -> None:
        known = tx.conn.connection.info
        if known.get(_WAITS) != seconds:
            tx.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
            known[_WAITS] = seconds

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except exc.IntegrityError:
            raise  # the caller knows what it means
        except exc.DBAPIError as error:
            if self.reserve is not None and is_disk_trouble(error):
                self.reserve.release()  # a quota shows only in the error; the next try finds room
            raise _translated(error, self.where, self._is_sqlite) from error

    def close(self) -> None:
        self.engine.dispose()
        if self._mark is not None:
            self._mark.close()


class _Unsuspended:
    """Ctrl-Z waits until the transaction has ended: a suspended process would keep everybody else from writing.

    Nothing helps against SIGSTOP, and a process with other threads is suspended through them.
    """

    _before: set[int] | None = None

    def __enter__(self) -> _Unsuspended:
        return self

    def begin(self) -> None:
        self._before = set(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS))

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def connect(url: str, patience: Patience | None = None) -> Database:
    """A database without looking into it; `store.schema.open_store` also checks its version."""
    parsed, patience = parse_url(url), patience or Patience()
    if parsed.get_backend_name() == "sqlite":
        return Database(sqlite_engine(parsed, patience.busy_s), str(parsed.database), patience)
    return Database(postgres_engine(parsed), parsed.render_as_string(hide_password=True), patience)


def broke(error: exc.IntegrityError, index: str, column: str) -> bool:
    """Whether it was this unique index that refused: PostgreSQL names the index, SQLite its columns."""
    text = str(error.orig)
    return f'"{index}"' in text or f"UNIQUE constraint failed: {column}" in text


def _is_busy(error: exc.DBAPIError) -> bool:
    return " is locked" in str(error.orig)


def _busy(where: str, holder: Holder | None, waited_s: float | None = None) -> StoreBusy:
    held = "" if waited_s is None else f" for at least {waited_s:.0f} s"
    who, advice = (holder, holder.advice) if holder else ("another process", "look for a tunesmith process that hangs")
    return StoreBusy(
        f"the store {where} is busy: {who} has held its lock{held}; {advice}, then try again. Nothing was changed"
    )


def _translated(error: exc.DBAPIError, where: str, is_sqlite: bool) -> Exception:
    """What a user can act on."""
    text = str(error.orig)
    first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if any(word in text for word in _CORRUPT):
        return StoreCorrupt(
            f"the store {where} is damaged ({first_line}); nothing was changed. Restore a backup, or copy the file "
            "away and recover it with sqlite3's .recover"
        )
    if is_sqlite and _is_busy(error):
        return _busy(where, find_holder(where))
    if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError):
        hint = "is the disk full or read-only?" if is_sqlite else "is the server running?"
        return StoreError(f"the store {where} cannot be used: {first_line}; {hint}")
    return error
