"""Reading without SQLAlchemy: listings are plain SQL, so that a quick command does not pay for importing it.

A `Reader` runs SQL text. A transaction of `store.database` is one, and so is a connection to a sound SQLite store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from tunesmith.core import clock
from tunesmith.core.errors import StoreError
from tunesmith.store.revisions import HEAD
from tunesmith.store.sqlite_files import CommitMark, refuse_unusable, wait_for_removed_log
from tunesmith.store.sqlite_library import journal_of, sqlite_module

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = (datetime.min.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
_LAST = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
_BUSY_S = 0.2  # the ordinary way waits as long as it is told to, and says who holds the lock


class Reader(Protocol):
    """Runs SQL text that both databases understand, in one consistent view of the store."""

    @property
    def now(self) -> datetime: ...

    @property
    def lease_clock(self) -> str: ...

    @property
    def lease_now(self) -> float: ...

    def rows(self, text: str, **values: Any) -> Sequence[Any]:
        """The rows by column name; `values` are the parameters that the text names as `:name`."""

    def json_text(self, column: str, *path: str) -> str:
        """SQL for the text at a path inside a JSON column."""


class NotQuick(Exception):
    """The store is not one to be read this way; the ordinary way opens it, or says what is wrong with it."""


class _SqliteReader:
    """A read transaction on a SQLite connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.now = clock.utc_now()
        self.lease_clock = clock.boot_id()
        self.lease_now = clock.boot_seconds()

    def rows(self, text: str, **values: Any) -> Sequence[Any]:
        return list(self._connection.execute(text, values))

    def json_text(self, column: str, *path: str) -> str:
        return sqlite_json_text(column, path)


@contextmanager
def read_sqlite(path: Path) -> Iterator[Reader]:
    """A reader of a store that is sound and of the current version. Raises NotQuick for any other."""
    module = sqlite_module()
    try:
        refuse_unusable(path)
        wait_for_removed_log(path)
        # not mode=ro: the last one to close a store moves its log into it, and a reader may be the last one
        opened = module.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None)
        with closing(opened) as connection:
            connection.execute("PRAGMA query_only = ON")
            if connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != journal_of(module):
                raise NotQuick
            connection.execute("BEGIN")
            if connection.execute("SELECT version_num FROM alembic_version").fetchall() != [(HEAD,)]:
                raise NotQuick
            CommitMark(str(path)).check(connection)
            connection.row_factory = module.Row
            yield _SqliteReader(connection)
    except (module.Error, StoreError, OSError) as error:
        raise NotQuick from error


def sqlite_json_text(column: str, path: Sequence[str]) -> str:
    return f"json_extract({column}, '$.{'.'.join(path)}')"


def postgres_json_text(column: str, path: Sequence[str]) -> str:
    return f"({column} #>> '{{{','.join(path)}}}')"


def instant_of(microseconds: Any) -> datetime:
    """The instant that a column of type `Instant` holds."""
    # what no calendar shows is still there to be read
    return EPOCH + timedelta(microseconds=min(max(int(microseconds), _FIRST), _LAST))


def json_of(value: Any) -> Any:
    """The value of a JSON column: SQLite gives its text, PostgreSQL what the text means."""
    return json.loads(value) if isinstance(value, str) else value
