"""Serving: servers, hand-overs of their device, answers of shadowed candidates."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_servers()
    _create_hand_overs()
    _create_shadow_answers()


def _create_servers() -> None:
    op.create_table(
        "servers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("serving", sa.JSON(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("seen_clock", sa.Text(), nullable=False),
        sa.Column("seen_until", sa.Float(), nullable=False),
        sa.CheckConstraint(
            "state IN ('serving', 'stepping_aside', 'aside', 'returning')", name=op.f("ck_servers_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_servers")),
    )


def _create_hand_overs() -> None:
    is_open = sa.text("state <> 'over'")
    op.create_table(
        "hand_overs",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("server_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.BigInteger(), nullable=False),
        sa.Column("given_at", sa.BigInteger(), nullable=True),
        sa.Column("over_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("state IN ('requested', 'given', 'over')", name=op.f("ck_hand_overs_state")),
        sa.CheckConstraint("(state = 'over') = (over_at IS NOT NULL)", name=op.f("ck_hand_overs_over")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_hand_overs_task_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_hand_overs")),
        sa.UniqueConstraint("id", name=op.f("uq_hand_overs_id")),
    )
    op.create_index(
        "uq_hand_overs_open", "hand_overs", ["task_id"], unique=True, sqlite_where=is_open, postgresql_where=is_open
    )
    op.create_index("ix_hand_overs_open", "hand_overs", ["host"], sqlite_where=is_open, postgresql_where=is_open)


def _create_shadow_answers() -> None:
    op.create_table(
        "shadow_answers",
        sa.Column("seq", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("response_id", sa.Text(), nullable=False),
        sa.Column("live_version", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("live_seconds", sa.Float(), nullable=False),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.Column("live_flags", sa.JSON(), nullable=False),
        sa.Column("observed_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("outcome IN ('answered', 'failed', 'timed_out')", name=op.f("ck_shadow_answers_outcome")),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_shadow_answers_adapter_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_shadow_answers_run_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_shadow_answers")),
        sa.UniqueConstraint("run_id", "response_id", name=op.f("uq_shadow_answers_run_id_response_id")),
    )
