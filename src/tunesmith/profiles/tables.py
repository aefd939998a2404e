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
    one_of("state", CampaignState),
    sa.Index("uq_campaigns_active", "profile", unique=True, **where("state = 'active'")),
)
