"""A profile that was locked without its base's digest takes that of the version that is live."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    bind = op.get_bind()
    versions = bind.execute(sa.text("SELECT profile, base_digest FROM adapters WHERE state = 'live'"))
    live = {profile: digest for profile, digest in versions}  # noqa: C416 - rows of SQLAlchemy are no pairs to dict()
    for name, stored in bind.execute(sa.text("SELECT name, lock FROM profiles")).all():
        lock = json.loads(stored) if isinstance(stored, str) else stored
        if lock.get("base_digest") is None and name in live:
            filled = json.dumps({**lock, "base_digest": live[name]})
            update = sa.text("UPDATE profiles SET lock = CAST(:lock AS JSON) WHERE name = :name")
            if bind.dialect.name == "sqlite":
                update = sa.text("UPDATE profiles SET lock = :lock WHERE name = :name")
            bind.execute(update, {"lock": filled, "name": name})
