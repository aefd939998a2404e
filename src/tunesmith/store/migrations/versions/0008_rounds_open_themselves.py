"""Campaigns have a name and say whether their overrides hold; one worker at a time holds the scheduler's lease."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "scheduler_leases",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("lease_clock", sa.Text, nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_scheduler_leases")),
    )
    op.add_column("campaigns", sa.Column("name", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("campaigns", sa.Column("description", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("campaigns", sa.Column("in_force", sa.Boolean, nullable=False, server_default=sa.text("false")))
    op.add_column("campaigns", sa.Column("moved_at", sa.BigInteger, nullable=False, server_default="0"))
    _name_campaigns(op.get_bind())
    # One that is paused now has had no say, and keeps it that way until somebody resumes it.
    op.execute("UPDATE campaigns SET moved_at = created_at, in_force = (state = 'active')")
    op.create_index("uq_campaigns_name", "campaigns", ["name"], unique=True)
    condition = sa.text("in_force")
    op.create_index(
        "uq_campaigns_in_force", "campaigns", ["profile"], unique=True,
        sqlite_where=condition, postgresql_where=condition,
    )  # fmt: skip
    condition = sa.text("campaign_id IS NOT NULL")
    op.create_index(
        "ix_runs_campaign", "runs", ["campaign_id", "seq"], sqlite_where=condition, postgresql_where=condition
    )


def _name_campaigns(bind: sa.Connection) -> None:
    """The first campaign of a profile has its name, the next ones a number behind it."""
    taken: set[str] = set()
    for campaign_id, profile in bind.execute(sa.text("SELECT id, profile FROM campaigns ORDER BY seq")).all():
        name, number = profile, 1
        while name in taken:
            number += 1
            name = f"{profile}-{number}"
        taken.add(name)
        bind.execute(sa.text("UPDATE campaigns SET name = :name WHERE id = :id"), {"name": name, "id": campaign_id})
