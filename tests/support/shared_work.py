"""What one process of the suite does once instead of once per test: compiling SQL, and walking over what stays.

Each test has a store of its own, so an engine of its own, and SQLAlchemy compiles a statement once per engine: that was
a third of the time of the tests of the store. The text depends on the kind of database alone.
"""

from __future__ import annotations

import gc
from typing import Any

from sqlalchemy.engine import Engine, default
from sqlalchemy.util import LRUCache

_compiled: dict[default.DefaultDialect, LRUCache[Any, Any]] = {}


def share_compiled_statements() -> None:
    """From now on all engines of one kind of database in this process, and in its forks, share what is compiled."""
    default.DefaultDialect.__hash__ = _hash  # type: ignore[method-assign]
    default.DefaultDialect.__eq__ = _are_equal  # type: ignore[method-assign]
    plain = Engine.__init__

    def shared(engine: Engine, *arguments: Any, **options: Any) -> None:
        plain(engine, *arguments, **options)
        engine._compiled_cache = _compiled.setdefault(engine.dialect, LRUCache(5000))  # type: ignore[assignment,arg-type]

    Engine.__init__ = shared  # type: ignore[method-assign]


def _hash(dialect: default.DefaultDialect) -> int:
    return hash(type(dialect))


def _are_equal(one: default.DefaultDialect, other: object) -> bool:
    return type(one) is type(other) and one.loaded_dbapi is getattr(other, "loaded_dbapi", None)


def keep_what_is_there() -> None:
    """Modules and tests stay to the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
