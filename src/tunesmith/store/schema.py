"""Opening a store: which schema version it has, bringing an older one up to date, refusing a newer one."""

from __future__ import annotations

import contextlib
import os
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import exc

from tunesmith.core.errors import StoreCorrupt, StoreError, StoreTooNew
from tunesmith.store.database import Database, connect
from tunesmith.store.lock_holder import Patience
from tunesmith.store.revisions import HEAD, REVISIONS
from tunesmith.store.sqlite_files import wait_for_removed_log
from tunesmith.store.sqlite_library import sqlite_module

_OWN = 0o600  # what people said is nobody else's; SQLite gives its other files the same rights
_MIGRATION_LOCK = 0x74756E65  # any constant; PostgreSQL's advisory lock for migrations


def open_store(url: str, *, create: bool = False, patience: Patience | None = None) -> Database:
    """An open store at the current schema version.

    With `create` an empty database is filled; without it an empty one is refused: a store that has lost its tables
    is damaged, and starting afresh in its place would bury the history.
    """
    database = connect(url, patience)
    try:
        _check_file(database, create=create)
        version = _version(database)
        if version is None and not create:
            raise _emptied(database)
        if version is not None and version not in REVISIONS:
            raise StoreTooNew(
                f"the store {database.where} has schema {version}, newer than this tunesmith knows ({HEAD}); "
                "upgrade tunesmith"
            )
        if version != HEAD:
            _migrate(database)
        database.follow_files(lambda: open_store(url, patience=patience).close())
    except BaseException:
        database.close()
        raise
    return database


def _check_file(database: Database, *, create: bool) -> None:
    if database.engine.dialect.name != "sqlite":
        return
    path = Path(database.where)
    if not path.parent.is_dir():
        raise StoreError(f"the folder of the store {path} does not exist; run `tunesmith init` first")
    if not path.exists() and not create:
        raise StoreError(f"the store {path} is missing, but this workspace had one; restore a backup")
    if not path.exists():
        with contextlib.suppress(OSError):  # somebody was quicker, or it cannot be made, which opening it says better
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _OWN))
    wait_for_removed_log(path)
    names = _table_names(path)
    if names == [] and not create:
        raise _emptied(database)
    if names and "alembic_version" not in names:
        raise _foreign(database)


def _table_names(path: Path) -> list[str] | None:
    """Looked at without a trace: opening a store switches its journal, and what is not a store is left as it is."""
    module = sqlite_module()
    try:
        with closing(module.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            return [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    except module.Error:
        return None  # damaged or unreadable, which the ordinary way says better


def _foreign(database: Database) -> StoreError:
    return StoreError(f"{database.where} holds another program's tables; give tunesmith a database of its own")


def _emptied(database: Database) -> StoreCorrupt:
    return StoreCorrupt(f"the store {database.where} is empty, but this workspace had one; restore a backup")


def _version(database: Database) -> str | None:
    with database.read() as tx:
        if not sa.inspect(tx.conn).has_table("alembic_version"):
            if sa.inspect(tx.conn).get_table_names():
                raise _foreign(database)
            return None
        row = tx.first(sa.text("SELECT version_num FROM alembic_version"))
    if row is None:
        raise StoreCorrupt(f"the store {database.where} has lost its schema version; restore a backup")
    return str(row["version_num"])


def _migrate(database: Database) -> None:
    """Run the missing migrations under a lock; of two processes at once, the second finds nothing left to do."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    try:
        with database.write() as tx:
            if tx.is_postgres:
                tx.conn.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            config.attributes["connection"] = tx.conn
            command.upgrade(config, "head")
    except exc.IntegrityError as error:
        raise StoreError(f"the store {database.where} could not be migrated: {error.orig}") from error


def integrity_problem(database: Database) -> str | None:
    """A full check of the file (SQLite), for `doctor` and drills; None means sound."""
    if database.engine.dialect.name != "sqlite":
        return None
    with database.read() as tx:
        rows = [str(value) for value in tx.conn.execute(sa.text("PRAGMA integrity_check")).scalars()]
        broken = list(tx.conn.execute(sa.text("PRAGMA foreign_key_check")))
    if rows != ["ok"]:
        return rows[0]
    return f"{len(broken)} rows refer to something that is gone" if broken else None
