"""What is learnt from experience: reviews, teachers' answers, money, members of datasets, erasures."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("assessments", sa.Column("review", sa.Text(), nullable=True))
    _create_reviews()
    _create_corrections()
    _create_spends()
    _create_members()
    _create_erasures()


def _create_reviews() -> None:
    op.create_table(
        "reviews",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("experience_id", sa.Text(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("reviewer", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("decision IN ('accept', 'reject')", name=op.f("ck_reviews_decision")),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], name=op.f("fk_reviews_experience_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_reviews")),
        sa.UniqueConstraint("id", name=op.f("uq_reviews_id")),
    )
    op.create_index("ix_reviews_experience", "reviews", ["experience_id", "seq"], unique=False)
    waiting = sa.text("class_name = 'quarantined' AND review IS NULL")
    op.create_index(
        "ix_assessments_waiting", "assessments", ["profile", "seq"], sqlite_where=waiting, postgresql_where=waiting
    )
    in_review = sa.text("in_review")
    op.create_index(
        "ix_experiences_in_review",
        "experiences",
        ["profile", "seq"],
        sqlite_where=in_review,
        postgresql_where=in_review,
    )


def _create_corrections() -> None:
    op.create_table(
        "corrections",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("experience_id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("teacher", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("counts", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state <> 'accepted' OR answer IS NOT NULL", name=op.f("ck_corrections_answer")),
        sa.CheckConstraint("state IN ('accepted', 'refused', 'failed')", name=op.f("ck_corrections_state")),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], name=op.f("fk_corrections_experience_id")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_corrections_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_corrections")),
        sa.UniqueConstraint("experience_id", "number", name=op.f("uq_corrections_experience_id_number")),
        sa.UniqueConstraint("id", name=op.f("uq_corrections_id")),
    )
    op.create_index("ix_corrections_profile", "corrections", ["profile", "seq"], unique=False)
    op.create_index(
        "uq_corrections_accepted",
        "corrections",
        ["experience_id"],
        unique=True,
        sqlite_where=sa.text("state = 'accepted'"),
        postgresql_where=sa.text("state = 'accepted'"),
    )


def _create_spends() -> None:
    op.create_table(
        "spends",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("cycle_id", sa.Text(), nullable=False),
        sa.Column("entity_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("settled_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(state = 'reserved') = (settled_at IS NULL)", name=op.f("ck_spends_settled")),
        sa.CheckConstraint("state IN ('reserved', 'settled')", name=op.f("ck_spends_state")),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_spends_amount")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_spends_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_spends")),
        sa.UniqueConstraint("id", name=op.f("uq_spends_id")),
    )
    op.create_index("ix_spends_profile", "spends", ["profile", "purpose", "created_at"], unique=False)
    op.create_index("ix_spends_cycle", "spends", ["cycle_id"], unique=False)
    op.create_index(
        "uq_spends_one_open",
        "spends",
        ["purpose", "entity_id"],
        unique=True,
        sqlite_where=sa.text("state = 'reserved'"),
        postgresql_where=sa.text("state = 'reserved'"),
    )


def _create_members() -> None:
    op.create_table(
        "members",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("experience_id", sa.Text(), nullable=False),
        sa.Column("example_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('gold', 'corrected', 'replay')", name=op.f("ck_members_role")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_members_dataset_id")),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], name=op.f("fk_members_experience_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_members")),
        sa.UniqueConstraint(
            "dataset_id", "experience_id", "example_id", name=op.f("uq_members_dataset_id_experience_id_example_id")
        ),
    )
    op.create_index("ix_members_experience", "members", ["experience_id"], unique=False)


def _create_erasures() -> None:
    op.create_table(
        "erasures",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("experience_id", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.BigInteger(), nullable=False),
        sa.Column("done_at", sa.BigInteger(), nullable=True),
        sa.Column("old_fingerprint", sa.Text(), nullable=False),
        sa.Column("new_fingerprint", sa.Text(), nullable=True),
        sa.Column("hashes", sa.JSON(), nullable=False),
        sa.CheckConstraint("(done_at IS NULL) = (new_fingerprint IS NULL)", name=op.f("ck_erasures_done")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_erasures_dataset_id")),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], name=op.f("fk_erasures_experience_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_erasures")),
        sa.UniqueConstraint("experience_id", "dataset_id", name=op.f("uq_erasures_experience_id_dataset_id")),
    )
    op.create_index(
        "ix_erasures_pending",
        "erasures",
        ["dataset_id"],
        unique=False,
        sqlite_where=sa.text("done_at IS NULL"),
        postgresql_where=sa.text("done_at IS NULL"),
    )
