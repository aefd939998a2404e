"""Every test here that asks for `database` runs on SQLite and on PostgreSQL."""

from databases import (
    database,
    postgres,
    postgres_store,
    sqlite_store,
    sqlite_template,
    store_url,
)

__all__ = ["database", "postgres", "postgres_store", "sqlite_store", "sqlite_template", "store_url"]
