"""Alembic's entry: runs the migrations on the connection that `store.schema` hands over."""

from alembic import context

from tunesmith.store import learning_tables as learning_tables  # noqa: PLC0414 - its tables join the metadata
from tunesmith.store import serving_tables as serving_tables  # noqa: PLC0414
from tunesmith.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
