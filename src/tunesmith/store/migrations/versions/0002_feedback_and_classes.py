"""Where an experience came from, what the verifiers and raters say about it, and its class."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name in ("source", "session", "served_by", "template", "task_type", "reference"):
        op.add_column("experiences", sa.Column(name, sa.Text(), nullable=True))
    op.add_column("experiences", sa.Column("captured_at", sa.BigInteger(), nullable=True))
    op.create_index("ix_experiences_profile", "experiences", ["profile", "seq"], unique=False)
    op.create_index(
        "ix_experiences_session",
        "experiences",
        ["profile", "session", "seq"],
        unique=False,
        sqlite_where=sa.text("session IS NOT NULL"),
        postgresql_where=sa.text("session IS NOT NULL"),
    )
    _create_assessments()
    _create_feedback()
    # what was stored before had nobody to judge it: it is ambiguous until somebody does
    op.execute(
        "INSERT INTO assessments "
        "(experience_id, profile, class_name, reasons, findings, suspicions, feedback, assessed_at) "
        "SELECT id, profile, 'ambiguous', '[\"stored before there were verifiers\"]', '{}', '[]', '{}', created_at "
        "FROM experiences ORDER BY seq"
    )


def _create_assessments() -> None:
    op.create_table(
        "assessments",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("experience_id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("class_name", sa.Text(), nullable=False),
        sa.Column("reasons", sa.JSON(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("suspicions", sa.JSON(), nullable=False),
        sa.Column("feedback", sa.JSON(), nullable=False),
        sa.Column("assessed_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "class_name IN ('gold', 'needs_improvement', 'ambiguous', 'quarantined')",
            name=op.f("ck_assessments_class_name"),
        ),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], name=op.f("fk_assessments_experience_id")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_assessments_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_assessments")),
        sa.UniqueConstraint("experience_id", name=op.f("uq_assessments_experience_id")),
    )
    op.create_index("ix_assessments_class", "assessments", ["profile", "class_name", "seq"], unique=False)


def _create_feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("experience_id", sa.Text(), nullable=False),
        sa.Column("rater", sa.Text(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("is_implicit", sa.Boolean(), nullable=False),
        sa.Column("confidence", sa.Float(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("correction", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("value IS NULL OR (value >= 0 AND value <= 1)", name=op.f("ck_feedback_value")),
        sa.CheckConstraint("NOT is_implicit OR correction IS NULL", name=op.f("ck_feedback_implicit")),
        sa.CheckConstraint(
            "value IS NOT NULL OR comment IS NOT NULL OR correction IS NOT NULL", name=op.f("ck_feedback_says")
        ),
        sa.ForeignKeyConstraint(["experience_id"], ["experiences.id"], name=op.f("fk_feedback_experience_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_id")),
    )
    op.create_index("ix_feedback_experience", "feedback", ["experience_id", "seq"], unique=False)
