"""Tables of the device: servers that run, and hand-overs between serving and training."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.programs.device.rules import HandOverState, ServerState
from tunesmith.store.columns import Instant, Sequence, metadata, one_of, where

servers = sa.Table(
    "servers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("process", sa.Text, nullable=False),  # pid, start time, boot id
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("device", sa.Text, nullable=False),  # cpu, cuda; what its engines compute on when they serve
    sa.Column("state", sa.Text, nullable=False),
    sa.Column(
        "serving", sa.JSON, nullable=False
    ),  # by profile, the version that its name means here; null for the base
    sa.Column("counts", sa.JSON, nullable=False),  # answers, refusals, captures and drops since it started
    sa.Column("started_at", Instant, nullable=False),
    sa.Column("seen_clock", sa.Text, nullable=False),
    sa.Column("seen_until", sa.Float, nullable=False),
    one_of("state", ServerState),
)
hand_overs = sa.Table(
    "hand_overs",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("task_id", sa.Text, sa.ForeignKey("tasks.id"), nullable=False),  # what needs the device
    sa.Column("server_id", sa.Text),  # who gave it; a server that is gone holds nothing
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("requested_at", Instant, nullable=False),
    sa.Column("given_at", Instant),
    sa.Column("over_at", Instant),
    one_of("state", HandOverState),
    sa.CheckConstraint("(state = 'over') = (over_at IS NOT NULL)", name="over"),
    sa.Index("uq_hand_overs_open", "task_id", unique=True, **where("state <> 'over'")),
    sa.Index("ix_hand_overs_open", "host", **where("state <> 'over'")),
)
