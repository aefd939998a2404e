"""The tables of what is learnt from experience: reviews, teachers' answers, money, members of datasets, erasures."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.experience.rules.learning import CorrectionState, MemberRole, ReviewDecision, SpendState
from tunesmith.store.tables import Instant, Sequence, assessments, experiences, metadata, one_of, where


def _seq() -> sa.Column[int]:
    return sa.Column("seq", Sequence, primary_key=True, autoincrement=True)


def _to(name: str, target: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, sa.ForeignKey(target), nullable=nullable)


reviews = sa.Table(
    "reviews",
    metadata,
    _seq(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _to("experience_id", "experiences.id"),
    sa.Column("decision", sa.Text, nullable=False),
    sa.Column("reviewer", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    one_of("decision", ReviewDecision),
    sa.Index("ix_reviews_experience", "experience_id", "seq"),
)
# what waits for a reviewer is few among many; the inbox counts it at every look
sa.Index(
    "ix_assessments_waiting",
    assessments.c.profile,
    assessments.c.seq,
    **where("class_name = 'quarantined' AND review IS NULL"),
)
sa.Index("ix_experiences_in_review", experiences.c.profile, experiences.c.seq, **where("in_review"))

corrections = sa.Table(
    "corrections",
    metadata,
    _seq(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _to("experience_id", "experiences.id"),
    _to("profile", "profiles.name"),
    sa.Column("number", sa.Integer, nullable=False),  # of the attempt at this experience, from 1
    sa.Column("teacher", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),  # why it was accepted or not, for people
    sa.Column("answer", sa.Text),  # unset where the teacher gave none
    sa.Column("findings", sa.JSON, nullable=False),  # what each verifier said about the answer
    sa.Column("counts", sa.Boolean, nullable=False),  # against the attempts allowed; not where the teacher was down
    sa.Column("created_at", Instant, nullable=False),
    one_of("state", CorrectionState),
    sa.CheckConstraint("state <> 'accepted' OR answer IS NOT NULL", name="answer"),
    sa.UniqueConstraint("experience_id", "number"),
    sa.Index(
        "uq_corrections_accepted",
        "experience_id",
        unique=True,
        **where("state = 'accepted'"),
    ),
    sa.Index("ix_corrections_profile", "profile", "seq"),
)

spends = sa.Table(
    "spends",
    metadata,
    _seq(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    _to("profile", "profiles.name"),
    sa.Column("purpose", sa.Text, nullable=False),  # what the money is for, such as curriculum
    sa.Column("cycle_id", sa.Text, nullable=False),  # what shares one budget, such as one cycle of the curriculum
    sa.Column("entity_id", sa.Text, nullable=False),  # for whom it is spent: an experience, a run
    sa.Column("state", sa.Text, nullable=False),
    # in millionths: the most it may cost while reserved, what it did cost when settled; whole, so that sums are exact
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("settled_at", Instant),
    one_of("state", SpendState),
    sa.CheckConstraint("amount >= 0", name="amount"),
    sa.CheckConstraint("(state = 'reserved') = (settled_at IS NULL)", name="settled"),
    sa.Index("ix_spends_profile", "profile", "purpose", "created_at"),
    sa.Index("ix_spends_cycle", "cycle_id"),
    sa.Index("uq_spends_one_open", "purpose", "entity_id", unique=True, **where("state = 'reserved'")),
)

members = sa.Table(
    "members",
    metadata,
    _seq(),
    _to("dataset_id", "datasets.id"),
    _to("experience_id", "experiences.id"),
    sa.Column("example_id", sa.Text, nullable=False),  # which example of the dataset was made from it
    sa.Column("group_id", sa.Text, nullable=False),  # its group, by which splits are decided and held-out cases named
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),  # why it is in, for people
    one_of("role", MemberRole),
    sa.UniqueConstraint("dataset_id", "experience_id", "example_id"),
    sa.Index("ix_members_experience", "experience_id"),
)

erasures = sa.Table(
    "erasures",
    metadata,
    _seq(),
    _to("experience_id", "experiences.id"),
    _to("dataset_id", "datasets.id"),
    sa.Column("requested_at", Instant, nullable=False),
    sa.Column("done_at", Instant),  # unset: a run still reads the dataset, its text goes when that has ended
    sa.Column("old_fingerprint", sa.Text, nullable=False),
    sa.Column("new_fingerprint", sa.Text),
    sa.Column("hashes", sa.JSON, nullable=False),  # of examples and texts: what is left to find them by
    sa.CheckConstraint("(done_at IS NULL) = (new_fingerprint IS NULL)", name="done"),
    sa.UniqueConstraint("experience_id", "dataset_id"),
    sa.Index(
        "ix_erasures_pending",
        "dataset_id",
        **where("done_at IS NULL"),
    ),
)
