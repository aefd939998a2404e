"""Tables of the record: runs, tasks, attempts, requests, checkpoints, workers, leases, switches."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import AttemptState, TaskKind, TaskState
from tunesmith.store.columns import Instant, Sequence, metadata, one_of, ref, where

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("profiles.name"),
    ref("campaigns.id", nullable=True),
    ref("datasets.id"),
    sa.Column("parent_id", sa.Text, sa.ForeignKey("runs.id")),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),  # why it is in that state, for people
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("automatic", sa.Boolean, nullable=False),  # opened by a trigger, not by a person
    sa.Column("idempotency_key", sa.Text, unique=True),
    sa.Column("body_hash", sa.Text, nullable=False),  # the same key with another body is a conflict
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("created_by", sa.Text, nullable=False),
    sa.Column("moved_at", Instant, nullable=False),
    sa.Column("finished_at", Instant),
    one_of("state", RunState),
    sa.CheckConstraint(
        f"(finished_at IS NULL) = (state IN ({', '.join(repr(s.value) for s in sorted(RUN.unfinished))}))",
        name="finished",
    ),
    sa.Index(
        "uq_runs_one_automatic",
        "campaign_id",
        unique=True,
        **where("automatic AND finished_at IS NULL"),
    ),
    sa.Index("ix_runs_unfinished", "profile", **where("finished_at IS NULL")),
    sa.Index("ix_runs_dataset", "dataset_id"),
    sa.Index("ix_runs_state", "state", "seq"),
    sa.Index("ix_runs_campaign", "campaign_id", "seq", **where("campaign_id IS NOT NULL")),
)
tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id")),
    sa.Column("profile", sa.Text, sa.ForeignKey("profiles.name")),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("payload", sa.JSON, nullable=False),
    sa.Column("available_clock", sa.Text),  # not before `available_at` on that clock; another clock means now
    sa.Column("available_at", sa.Float),
    sa.Column("lease_token", sa.Text),
    sa.Column("lease_clock", sa.Text),
    sa.Column("lease_until", sa.Float),
    sa.Column("worker_id", sa.Text),
    sa.Column("num_attempts", sa.Integer, nullable=False),
    sa.Column("num_crashes", sa.Integer, nullable=False),
    sa.Column("num_errors", sa.Integer, nullable=False),
    sa.Column("num_shrinks", sa.Integer, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    one_of("state", TaskState),
    one_of("kind", TaskKind),
    sa.CheckConstraint("(state = 'leased') = (lease_token IS NOT NULL)", name="lease"),
    sa.Index("ix_tasks_waiting", "priority", "seq", **where("state = 'waiting'")),
    sa.Index("ix_tasks_leased", "lease_until", **where("state = 'leased'")),
    sa.Index(
        "uq_tasks_one_open_per_run",
        "run_id",
        unique=True,
        **where("state IN ('waiting', 'leased') AND run_id IS NOT NULL"),
    ),
    sa.Index("ix_tasks_run", "run_id", **where("run_id IS NOT NULL")),
)
attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    ref("tasks.id"),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("token", sa.Text, nullable=False),  # the result must carry it
    sa.Column("error_class", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("process", sa.Text),  # pid, start time, boot id of the program, for the reaper
    sa.Column("started_at", Instant, nullable=False),
    sa.Column("ended_at", Instant),
    sa.Column("result", sa.JSON),
    one_of("state", AttemptState),
    sa.CheckConstraint("(state = 'open') = (ended_at IS NULL)", name="ended"),
    sa.UniqueConstraint("task_id", "number"),
    sa.Index("uq_attempts_one_open", "task_id", unique=True, **where("state = 'open'")),
)
requests = sa.Table(
    "requests",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("runs.id"),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("expires_at", Instant, nullable=False),
    sa.Column("acknowledged_at", Instant),
    sa.Column("answer", sa.Text),
    one_of("kind", RequestKind),
    sa.Index("uq_requests_open", "run_id", "kind", unique=True, **where("acknowledged_at IS NULL")),
)
checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    ref("runs.id"),
    ref("attempts.id"),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("path", sa.Text, nullable=False),  # relative to the workspace's data folder
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("kinds", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.UniqueConstraint("attempt_id", "path"),
    sa.Index("ix_checkpoints_run", "run_id", "step"),
)
workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("kinds", sa.JSON, nullable=False),
    sa.Column("started_at", Instant, nullable=False),
    sa.Column("seen_clock", sa.Text, nullable=False),
    sa.Column("seen_until", sa.Float, nullable=False),  # alive until then on that clock
)
scheduler_leases = sa.Table(
    "scheduler_leases",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),  # what only one may do at a time
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("lease_clock", sa.Text, nullable=False),
    sa.Column("lease_until", sa.Float, nullable=False),
)
switches = sa.Table(
    "switches",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("is_on", sa.Boolean, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("moved_at", Instant, nullable=False),
)
