"""Every test here that asks for `database` runs on SQLite and on PostgreSQL."""

from support.databases import (  # noqa: F401 - fixtures
    database,
    postgres,
    postgres_database,
    postgres_store,
    sqlite_store,
    sqlite_template,
    store_url,
)
