"""The migrated schema is the one the code believes in, on both databases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from support import tables  # imports all of them
from support.rows import dump
from tunesmith.store.database import Database
from tunesmith.store.revisions import HEAD, REVISIONS
from tunesmith.store.schema import open_store


def test_migrated_schema_equals_the_tables(database: Database) -> None:
    with database.read() as tx:
        context = MigrationContext.configure(tx.conn, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, tables.metadata) == []


def test_migrated_checks_and_partial_indexes_equal_the_tables(database: Database) -> None:
    """What alembic does not compare: check constraints, and the conditions of partial indexes."""
    with database.read() as tx:
        inspector = sa.inspect(tx.conn)
        for table in tables.metadata.sorted_tables:
            checks = {str(c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
            assert {str(check["name"]) for check in inspector.get_check_constraints(table.name)} == checks, table.name
            partial = {
                str(i.name) for i in table.indexes if i.dialect_options[tx.conn.dialect.name]["where"] is not None
            }
            assert _partial_indexes(tx.conn, table.name) == partial, table.name


def test_checks_of_the_migration_say_the_same_as_those_of_the_tables(database: Database) -> None:
    """States are spelt out in the migration; a new one must come with a new migration."""
    if database.engine.dialect.name != "sqlite":
        return  # PostgreSQL rewrites the text; SQLite keeps it
    with database.read() as tx:
        for table in tables.metadata.sorted_tables:
            for check in sa.inspect(tx.conn).get_check_constraints(table.name):
                ours = next(
                    c for c in table.constraints if isinstance(c, sa.CheckConstraint) and c.name == check["name"]
                )
                assert _words(check["sqltext"]) == _words(str(ours.sqltext)), check["name"]


def _words(text: str) -> list[str]:
    return sorted(text.replace("(", " ").replace(")", " ").replace(",", " ").split())


def _partial_indexes(conn: sa.Connection, table: str) -> set[str]:
    query = (
        "SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = :table AND sql LIKE '%WHERE%'"
        if conn.dialect.name == "sqlite"
        else "SELECT indexname FROM pg_indexes WHERE tablename = :table AND indexdef LIKE '%WHERE%'"
    )
    return {str(name) for name in conn.execute(sa.text(query), {"table": table}).scalars()}


def test_every_revision_has_a_migration_and_the_store_is_at_the_last(database: Database) -> None:
    from pathlib import Path

    from tunesmith.store import migrations

    folder = Path(next(iter(migrations.__path__))) / "versions"
    numbers = sorted(path.name.partition("_")[0] for path in folder.glob("[0-9]*.py"))
    assert numbers == list(REVISIONS)
    with database.read() as tx:
        assert tx.execute("SELECT version_num FROM alembic_version").fetchone()[0] == HEAD == REVISIONS[-1]


def test_opening_a_store_again_changes_nothing(store_url: str, database: Database) -> None:
    before = dump(database)
    open_store(store_url).close()
    open_store(store_url, create=True).close()
    assert dump(database) == before
