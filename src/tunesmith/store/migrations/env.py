"""Alembic's entry: runs the migrations on the connection that `store.schema` hands over.

It knows no table: a migration says what it changes, and never changes itself.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
