"""Requests are counted by version, and the answers of one version are found without reading all others."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "traffic",
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("begins_at", sa.BigInteger, nullable=False),
        sa.Column("range", sa.Integer, nullable=False),
        sa.Column("num", sa.BigInteger, nullable=False),
        sa.CheckConstraint("num > 0", name=op.f("ck_traffic_num")),
        sa.PrimaryKeyConstraint("profile", "version", "begins_at", "range", name=op.f("pk_traffic")),
    )
    op.create_index("ix_traffic_begins_at", "traffic", ["begins_at"])
    condition = sa.text("served_by IS NOT NULL")
    op.create_index(
        "ix_experiences_served_by", "experiences", ["profile", "served_by", "seq"],
        sqlite_where=condition, postgresql_where=condition,
    )  # fmt: skip
