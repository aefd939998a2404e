"""What the tables of every package are made of: one metadata, column types, checks and partial indexes."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

from tunesmith.store.reader import EPOCH, instant_of

Sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")
metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Instant(TypeDecorator[datetime]):
    """An aware UTC instant, kept as microseconds so that both databases order and compare it alike."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else (value - EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else instant_of(value)


def one_of(column: str, enum: type[StrEnum]) -> sa.CheckConstraint:
    values = ", ".join(f"'{member.value}'" for member in enum)
    return sa.CheckConstraint(f"{column} IN ({values})", name=column)


def where(condition: str) -> dict[str, Any]:
    """A partial index, spelt for both databases."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def ref(target: str, *, nullable: bool = False) -> sa.Column[str]:
    table, column = target.split(".")
    name = {"profiles": "profile"}.get(table, f"{table[:-1]}_id")
    return sa.Column(name, sa.Text, sa.ForeignKey(f"{table}.{column}"), nullable=nullable)


def seq_column() -> sa.Column[int]:
    return sa.Column("seq", Sequence, primary_key=True, autoincrement=True)


def reference(name: str, target: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, sa.ForeignKey(target), nullable=nullable)
