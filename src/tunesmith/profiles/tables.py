"""Tables of profiles and campaigns."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.store.columns import Instant, Sequence, metadata, one_of, ref, where

profiles = sa.Table(
    "profiles",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("lock", sa.JSON, nullable=False),
    sa.Column("locked_at", Instant, nullable=False),
    sa.Column("num_versions", sa.Integer, nullable=False, server_default="0"),  # adapter versions given out so far
)
campaigns = sa.Table(
    "campaigns",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("profiles.name"),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("overrides", sa.JSON, nullable=False),
    sa.Column("budget", sa.JSON, nullable=False),
    sa.Column("code_version", sa.Text, nullable=False),
    sa.Column("config_hash", sa.Text, nullable=False),
    sa.Column("parent_id", sa.Text, sa.ForeignKey("campaigns.id")),
    sa.Column("counters", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("name", sa.Text, nullable=False, server_default=sa.text("''")),
    sa.Column("description", sa.Text, nullable=False, server_default=sa.text("''")),
    # its overrides hold: it is active, or was paused and nothing has taken its place
    sa.Column("in_force", sa.Boolean, nullable=False, server_default=sa.text("false")),
    sa.Column("moved_at", Instant, nullable=False, server_default="0"),  # when its state was set
    one_of("state", CampaignState),
    sa.Index("uq_campaigns_active", "profile", unique=True, **where("state = 'active'")),
    sa.Index("uq_campaigns_in_force", "profile", unique=True, **where("in_force")),
    sa.Index("uq_campaigns_name", "name", unique=True),
)
