"""The tables, and what the database itself refuses: checks, foreign keys, partial unique indexes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from tunesmith.experience.rules.experience import ExperienceClass, ExperienceState
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import AttemptState, TaskKind, TaskState
from tunesmith.store.instant import Instant as Instant  # noqa: PLC0414 - known from here

Sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")
metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def one_of(column: str, enum: type[StrEnum]) -> sa.CheckConstraint:
    values = ", ".join(f"'{member.value}'" for member in enum)
    return sa.CheckConstraint(f"{column} IN ({values})", name=column)


def where(condition: str) -> dict[str, Any]:
    """A partial index, spelt for both databases."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def _ref(target: str, *, nullable: bool = False) -> sa.Column[str]:
    table, column = target.split(".")
    name = {"profiles": "profile"}.get(table, f"{table[:-1]}_id")
    return sa.Column(name, sa.Text, sa.ForeignKey(f"{table}.{column}"), nullable=nullable)


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
    _ref("profiles.name"),
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

datasets = sa.Table(
    "datasets",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _ref("profiles.name"),
    sa.Column("path", sa.Text, nullable=False),  # relative to the workspace's data folder
    sa.Column("fingerprint", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("counts", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("reserved_until", Instant),  # a dataset without a run keeps its reservation until then
    sa.Index("ix_datasets_fingerprint", "profile", "fingerprint"),
)

heldout_cases = sa.Table(
    "heldout_cases",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    _ref("profiles.name"),
    sa.Column("case_id", sa.Text, nullable=False),
    sa.Column("messages", sa.JSON, nullable=False),
    _ref("datasets.id"),
    sa.Column("added_at", Instant, nullable=False),
    sa.UniqueConstraint("dataset_id", "case_id"),
    sa.Index("ix_heldout_cases_profile", "profile", "seq"),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _ref("profiles.name"),
    _ref("campaigns.id", nullable=True),
    _ref("datasets.id"),
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
    _ref("tasks.id"),
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
    _ref("runs.id"),
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
    _ref("runs.id"),
    _ref("attempts.id"),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("path", sa.Text, nullable=False),  # relative to the workspace's data folder
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("kinds", sa.JSON, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.UniqueConstraint("attempt_id", "path"),
    sa.Index("ix_checkpoints_run", "run_id", "step"),
)

adapters = sa.Table(
    "adapters",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    _ref("profiles.name"),
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

deployments = sa.Table(
    "deployments",
    metadata,
    sa.Column("profile", sa.Text, sa.ForeignKey("profiles.name"), primary_key=True),
    sa.Column("wanted_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("previous_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),  # N−1, kept for rollback
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

evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _ref("runs.id"),
    _ref("adapters.id"),
    sa.Column("baseline_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("judged", sa.JSON, nullable=False),  # evidence, report, verdict
    sa.Column("scores_path", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Index("ix_evaluations_run", "run_id", "seq"),
)

experiences = sa.Table(
    "experiences",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _ref("profiles.name"),
    sa.Column("natural_key", sa.Text, nullable=False),
    sa.Column("messages", sa.JSON, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    _ref("datasets.id", nullable=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id")),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("num_rejections", sa.Integer, nullable=False),
    sa.Column("in_review", sa.Boolean, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("source", sa.Text),
    sa.Column("session", sa.Text),  # the conversation it was part of, as the application calls it
    sa.Column("served_by", sa.Text),  # the adapter version that answered; `adapter_id` is the one that learnt from it
    sa.Column("template", sa.Text),
    sa.Column("task_type", sa.Text),
    sa.Column("reference", sa.Text),
    sa.Column("captured_at", Instant),  # when it happened; `created_at` is when we heard of it
    sa.Column("key_label", sa.Text),  # the API key that `tunesmith serve` gave this answer to; null: not served
    one_of("state", ExperienceState),
    sa.CheckConstraint("(state IN ('reserved', 'consumed')) = (dataset_id IS NOT NULL)", name="reservation"),
    sa.UniqueConstraint("profile", "natural_key"),
    sa.Index("ix_experiences_state", "profile", "state"),
    sa.Index("ix_experiences_dataset", "dataset_id"),
    sa.Index("ix_experiences_profile", "profile", "seq"),
    sa.Index("ix_experiences_session", "profile", "session", "seq", **where("session IS NOT NULL")),
)

assessments = sa.Table(
    "assessments",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("experience_id", sa.Text, sa.ForeignKey("experiences.id"), nullable=False, unique=True),
    _ref("profiles.name"),
    sa.Column("class_name", sa.Text, nullable=False),
    sa.Column("reasons", sa.JSON, nullable=False),
    sa.Column("findings", sa.JSON, nullable=False),  # what each verifier said when it was written
    sa.Column("suspicions", sa.JSON, nullable=False),
    sa.Column("feedback", sa.JSON, nullable=False),  # the running aggregate
    sa.Column("review", sa.Text),  # the last decision of a person about its suspicions
    sa.Column("assessed_at", Instant, nullable=False),
    one_of("class_name", ExperienceClass),
    sa.Index("ix_assessments_class", "profile", "class_name", "seq"),
)

feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _ref("experiences.id"),
    sa.Column("rater", sa.Text, nullable=False),
    sa.Column("value", sa.Float),
    sa.Column("is_implicit", sa.Boolean, nullable=False),
    sa.Column("confidence", sa.Float, nullable=False),
    sa.Column("comment", sa.Text),
    sa.Column("correction", sa.Text),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("key_label", sa.Text),  # the API key it came with; null: not over HTTP
    sa.CheckConstraint("value IS NULL OR (value >= 0 AND value <= 1)", name="value"),
    sa.CheckConstraint("NOT is_implicit OR correction IS NULL", name="implicit"),  # a complaint is never an answer
    sa.CheckConstraint("value IS NOT NULL OR comment IS NOT NULL OR correction IS NOT NULL", name="says"),
    sa.Index("ix_feedback_experience", "experience_id", "seq"),
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

switches = sa.Table(
    "switches",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("is_on", sa.Boolean, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("moved_at", Instant, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("entity", sa.Text, nullable=False),
    sa.Column("entity_id", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("old_state", sa.Text),
    sa.Column("new_state", sa.Text),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("detail", sa.JSON, nullable=False),
    sa.Column("at", Instant, nullable=False),
    sa.Index("ix_events_entity", "entity", "entity_id", "seq"),
)
