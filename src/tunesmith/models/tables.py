"""Table of adapter versions."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.models.rules import AdapterState
from tunesmith.store.columns import Instant, metadata, one_of, ref, where

adapters = sa.Table(
    "adapters",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    ref("profiles.name"),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id"), unique=True),
    sa.Column("path", sa.Text, nullable=False),  # relative to the workspace's data folder
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("base_digest", sa.Text, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    one_of("state", AdapterState),
    sa.UniqueConstraint("profile", "version"),
    sa.Index("uq_adapters_one_live", "profile", unique=True, **where("state = 'live'")),
)
