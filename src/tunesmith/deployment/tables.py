"""Tables of deployments: what is wanted live, and what each target was seen to serve."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.store.columns import Instant, metadata

deployments = sa.Table(
    "deployments",
    metadata,
    sa.Column("profile", sa.Text, sa.ForeignKey("profiles.name"), primary_key=True),
    sa.Column("wanted_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("previous_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),  # kept for a roll-back
    sa.Column("flipped_at", Instant, nullable=False),
    sa.Column("flipped_by", sa.Text, nullable=False),
    sa.Column("targets", sa.JSON, nullable=False),  # the targets that must follow, as in the run's spec
)
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("profile", sa.Text, sa.ForeignKey("profiles.name"), primary_key=True),
    sa.Column("target", sa.Text, primary_key=True),
    sa.Column("observed_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("synced_at", Instant),
    sa.Column("error", sa.Text),
)
