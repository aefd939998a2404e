"""SQL statements of the hot path, compiled once per dialect, so that a call costs only the driver's work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement

from tunesmith.store.connections import BOOT_SECONDS
from tunesmith.store.database import Tx

_PARAMETER = re.compile(r"%[(](\w+)[)]s")
Convert = Callable[[Any], Any] | None


@dataclass(frozen=True)
class _CompiledForDialect:
    """One statement compiled for one dialect: its text, and the converters of its parameters and columns."""

    text: str
    is_positional: bool
    binds: tuple[tuple[str, Convert], ...]
    constants: dict[str, Any]
    columns: tuple[tuple[str, Convert], ...]

    def parameters(self, values: dict[str, Any]) -> Any:
        given = {**self.constants, **values} if self.constants else values
        if self.is_positional:
            return tuple([given[name] if convert is None else convert(given[name]) for name, convert in self.binds])
        return {name: given[name] if convert is None else convert(given[name]) for name, convert in self.binds}


class CompiledStatement:
    """A SQLAlchemy Core statement with named parameters, compiled once: compiling costs more than running it."""

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        self._statement = statement
        self._by_dialect: dict[str, _CompiledForDialect] = {}

    def run(self, tx: Tx, **values: Any) -> int:
        """Execute a write; return the number of rows it touched."""
        compiled = self.compiled_for(tx)
        return int(tx.execute(compiled.text, compiled.parameters(values)).rowcount)

    def first(self, tx: Tx, **values: Any) -> dict[str, Any] | None:
        """Return the first row by column name, or None."""
        compiled = self.compiled_for(tx)
        rows = tx.execute(compiled.text, compiled.parameters(values)).fetchall()
        if not rows:
            return None
        pairs = zip(compiled.columns, rows[0], strict=True)
        return {name: value if convert is None else convert(value) for (name, convert), value in pairs}

    def compiled_for(self, tx: Tx) -> _CompiledForDialect:
        dialect = tx.conn.dialect
        compiled = self._by_dialect.get(dialect.name)
        if compiled is None:
            compiled = self._by_dialect[dialect.name] = _compile(self._statement, dialect)
        return compiled


def execute_batch(tx: Tx, *writes: tuple[CompiledStatement, dict[str, Any]]) -> list[int]:
    """Execute independent writes, in one round trip on PostgreSQL. Returns the number of rows that each touched."""
    if not tx.is_postgres or len(writes) == 1:
        return [statement.run(tx, **values) for statement, values in writes]
    parts = tuple([statement.compiled_for(tx) for statement, _ in writes])
    parameters = {
        f"{number}_{name}": value
        for number, (part, (_, values)) in enumerate(zip(parts, writes, strict=True))
        for name, value in part.parameters(values).items()
    }
    return list(tx.execute(_one_statement(tuple([part.text for part in parts])), parameters).fetchone())


@cache
def _one_statement(texts: tuple[str, ...]) -> str:
    """Return one PostgreSQL statement that does all these writes and counts their rows."""
    numbered = [_PARAMETER.sub(rf"%({number}_\1)s", text) for number, text in enumerate(texts)]
    parts = ", ".join(f"w{number} AS ({text} RETURNING 1)" for number, text in enumerate(numbered))
    counts = ", ".join(f"(SELECT count(*) FROM w{number})" for number in range(len(texts)))  # noqa: S608 - our names
    return f"WITH {parts} SELECT {counts}"


def insert_into(table: sa.Table, columns: str, **literals: str) -> sa.Insert:
    """An insert that gives every named column a parameter of its name, and the others these SQL literals."""
    named = {name: sa.bindparam(name, type_=table.c[name].type) for name in columns.split()}
    fixed: dict[str, Any] = {name: sa.literal_column(text) for name, text in literals.items()}
    return table.insert().values({**named, **fixed}).inline()


def _compile(statement: sa.Select[Any] | sa.Insert | sa.Update, dialect: sa.Dialect) -> _CompiledForDialect:
    compiled = statement.compile(dialect=dialect)
    names = compiled.positiontup if compiled.positional else list(compiled.binds)
    assert names is not None
    binds = tuple((name, compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names)
    returned = statement.selected_columns if isinstance(statement, sa.Select) else statement.exported_columns
    columns = tuple((column.name, _from_driver(column.type, dialect)) for column in returned)
    constants = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}
    return _CompiledForDialect(str(compiled), compiled.positional, binds, constants, columns)


def _from_driver(column_type: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> Convert:
    if isinstance(column_type, sa.Float):  # both drivers give floats as they are
        return None
    return column_type.dialect_impl(dialect).result_processor(dialect, None)


class lease_now(ColumnElement[float]):  # noqa: N801 - named like the SQL function it is
    """The time that leases are measured on, in SQL: one round trip less than asking for it first."""

    inherit_cache = True
    type = sa.Float()


@compiles(lease_now, "sqlite")
def _on_sqlite(element: lease_now, compiler: Any, **options: Any) -> str:
    return f"{BOOT_SECONDS}()"


@compiles(lease_now, "postgresql")
def _on_postgres(element: lease_now, compiler: Any, **options: Any) -> str:
    # of the statement, not of the transaction: a transaction may have waited for a lock
    return "CAST(EXTRACT(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)"
