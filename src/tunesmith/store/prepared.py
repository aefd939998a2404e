"""Statements of the hot path: compiled once per kind of database, so that per call only the driver's work is left."""

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
class _Form:
    """One statement in one dialect: its text, how values go in, how columns come out."""

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


class Prepared:
    """A Core statement whose parameters are all named; building and caching it anew costs more than running it."""

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        self._statement = statement
        self._forms: dict[str, _Form] = {}

    def run(self, tx: Tx, **values: Any) -> int:
        """Execute a write and say how many rows it touched."""
        form = self.form(tx)
        return int(tx.execute(form.text, form.parameters(values)).rowcount)

    def first(self, tx: Tx, **values: Any) -> dict[str, Any] | None:
        """The first row, by column."""
        form = self.form(tx)
        rows = tx.execute(form.text, form.parameters(values)).fetchall()
        if not rows:
            return None
        pairs = zip(form.columns, rows[0], strict=True)
        return {name: value if convert is None else convert(value) for (name, convert), value in pairs}

    def form(self, tx: Tx) -> _Form:
        dialect = tx.conn.dialect
        form = self._forms.get(dialect.name)
        if form is None:
            form = self._forms[dialect.name] = _compile(self._statement, dialect)
        return form


def run_together(tx: Tx, *writes: tuple[Prepared, dict[str, Any]]) -> list[int]:
    """Writes that do not depend on each other: one round trip on PostgreSQL. Says how many rows each touched."""
    if not tx.is_postgres or len(writes) == 1:
        return [prepared.run(tx, **values) for prepared, values in writes]
    forms = tuple([prepared.form(tx) for prepared, _ in writes])
    parameters = {
        f"{number}_{name}": value
        for number, (form, (_, values)) in enumerate(zip(forms, writes, strict=True))
        for name, value in form.parameters(values).items()
    }
    return list(tx.execute(_joined(tuple([form.text for form in forms])), parameters).fetchone())


@cache
def _joined(texts: tuple[str, ...]) -> str:
    """One PostgreSQL statement that makes all these writes and counts their rows."""
    numbered = [_PARAMETER.sub(rf"%({number}_\1)s", text) for number, text in enumerate(texts)]
    parts = ", ".join(f"w{number} AS ({text} RETURNING 1)" for number, text in enumerate(numbered))
    counts = ", ".join(f"(SELECT count(*) FROM w{number})" for number in range(len(texts)))  # noqa: S608 - our names
    return f"WITH {parts} SELECT {counts}"


def insert_into(table: sa.Table, columns: str, **literals: str) -> sa.Insert:
    """An insert that gives every named column a parameter of its name, and the others these SQL literals."""
    named = {name: sa.bindparam(name, type_=table.c[name].type) for name in columns.split()}
    fixed: dict[str, Any] = {name: sa.literal_column(text) for name, text in literals.items()}
    return table.insert().values({**named, **fixed}).inline()


def _compile(statement: sa.Select[Any] | sa.Insert | sa.Update, dialect: sa.Dialect) -> _Form:
    compiled = statement.compile(dialect=dialect)
    names = compiled.positiontup if compiled.positional else list(compiled.binds)
    assert names is not None
    binds = tuple((name, compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names)
    returned = statement.selected_columns if isinstance(statement, sa.Select) else statement.exported_columns
    columns = tuple((column.name, _from_driver(column.type, dialect)) for column in returned)
    constants = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}
    return _Form(str(compiled), compiled.positional, binds, constants, columns)


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
