"""The tables of serving: which servers run, who asked for their device, what a shadowed candidate did."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.programs.device.server_state import HandOverState, ServerState, ShadowOutcome
from tunesmith.store.tables import Instant, Sequence, metadata, one_of, where

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

shadow_answers = sa.Table(
    "shadow_answers",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), nullable=False),
    sa.Column("response_id", sa.Text, nullable=False),  # of the live answer, by which its experience is found
    sa.Column("live_version", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("answer", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("live_seconds", sa.Float, nullable=False),
    sa.Column("flags", sa.JSON, nullable=False),  # what the profile's verifiers say against it
    sa.Column("live_flags", sa.JSON, nullable=False),
    sa.Column("observed_at", Instant, nullable=False),
    one_of("outcome", ShadowOutcome),
    sa.UniqueConstraint("run_id", "response_id"),
)
