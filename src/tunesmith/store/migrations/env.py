"""Alembic's entry: runs the migrations on the connection that `store.schema` hands over."""

from alembic import context

from tunesmith.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
