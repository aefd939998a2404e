"""Tables of datasets: what they are, what they hold out, and which experiences they were made from."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.datasets.report import MemberRole
from tunesmith.store.columns import Instant, Sequence, metadata, one_of, ref, reference, seq_column

datasets = sa.Table(
    "datasets",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("profiles.name"),
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
    ref("profiles.name"),
    sa.Column("case_id", sa.Text, nullable=False),
    sa.Column("messages", sa.JSON, nullable=False),
    ref("datasets.id"),
    sa.Column("added_at", Instant, nullable=False),
    sa.UniqueConstraint("dataset_id", "case_id"),
    sa.Index("ix_heldout_cases_profile", "profile", "seq"),
)

members = sa.Table(
    "members",
    metadata,
    seq_column(),
    reference("dataset_id", "datasets.id"),
    reference("experience_id", "experiences.id"),
    sa.Column("example_id", sa.Text, nullable=False),  # which example of the dataset was made from it
    sa.Column("group_id", sa.Text, nullable=False),  # its group, by which splits are decided and held-out cases named
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),  # why it is in, for people
    one_of("role", MemberRole),
    sa.UniqueConstraint("dataset_id", "experience_id", "example_id"),
    sa.Index("ix_members_experience", "experience_id"),
)
