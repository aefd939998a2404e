"""Table of what teachers cost."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.curriculum.rules.cycle import SpendState
from tunesmith.store.columns import Instant, metadata, one_of, reference, seq_column, where

spends = sa.Table(
    "spends",
    metadata,
    seq_column(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    reference("profile", "profiles.name"),
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
