"""Which API key an answer was served to, and which API key a rating came with."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # null for what is there: nobody wrote down the key, so no key may rate it over HTTP any more
    op.add_column("experiences", sa.Column("key_label", sa.Text(), nullable=True))
    op.add_column("feedback", sa.Column("key_label", sa.Text(), nullable=True))
