"""A version can be rejected; the run of a version that was rolled back says so."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BEFORE = "state IN ('candidate', 'live', 'superseded', 'rolled_back', 'revoked')"
_NOW = "state IN ('candidate', 'live', 'superseded', 'rolled_back', 'rejected', 'revoked')"


def upgrade() -> None:
    _let_versions_be_rejected(op.get_bind())
    op.execute(
        "UPDATE adapters SET state = 'rejected' WHERE state = 'candidate' "
        "AND run_id IN (SELECT id FROM runs WHERE state = 'rejected')"
    )
    op.execute(
        "UPDATE runs SET state = 'rolled_back' WHERE state = 'deployed' "
        "AND id IN (SELECT run_id FROM adapters WHERE state = 'rolled_back')"
    )


def _let_versions_be_rejected(bind: sa.Connection) -> None:
    if bind.dialect.name == "postgresql":
        op.drop_constraint(op.f("ck_adapters_state"), "adapters", type_="check")
        op.create_check_constraint(op.f("ck_adapters_state"), "adapters", _NOW)
        return
    # SQLite cannot alter a check, and a table that others refer to cannot be made anew inside a transaction. Its
    # manual (ALTER TABLE, "changing only the schema text") allows this for a check that refuses less than before.
    version = bind.exec_driver_sql("PRAGMA schema_version").scalar_one()
    bind.exec_driver_sql("PRAGMA writable_schema = ON")
    changed = bind.exec_driver_sql(
        "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE type = 'table' AND name = 'adapters'", (_BEFORE, _NOW)
    )
    assert changed.rowcount == 1
    bind.exec_driver_sql(f"PRAGMA schema_version = {int(version) + 1}")
    bind.exec_driver_sql("PRAGMA writable_schema = OFF")
