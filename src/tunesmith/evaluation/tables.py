"""Table of evaluations."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.store.columns import Instant, Sequence, metadata, ref

evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("runs.id"),
    ref("adapters.id"),
    sa.Column("baseline_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("judged", sa.JSON, nullable=False),  # evidence, report, verdict
    sa.Column("scores_path", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Index("ix_evaluations_run", "run_id", "seq"),
)
