"""The SQLite that is linked in, and the journal that is safe with it."""

from __future__ import annotations

import importlib
from types import ModuleType


def sqlite_module() -> ModuleType:
    """The SQLite that is linked in: pysqlite3 where installed (no WAL-reset bug), else the standard library's."""
    try:
        return importlib.import_module("pysqlite3.dbapi2")
    except ImportError:
        return importlib.import_module("sqlite3.dbapi2")


def wal_is_safe(version: tuple[int, ...]) -> bool:
    """Older releases can drop committed pages when a WAL restarts; three branches carry the fix."""
    return version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)


def journal_of(module: ModuleType) -> str:
    """The journal mode that a store is kept in."""
    return "WAL" if wal_is_safe(module.sqlite_version_info) else "DELETE"
