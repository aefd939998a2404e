"""The statements behind `runs/queries/tasks.py` that run for every task and every heartbeat, compiled once.

States and kinds are literals in them: bound parameters would hide the partial indexes from the planner.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import sqlalchemy as sa

from tunesmith.runs.queries.switches import ESTOP
from tunesmith.runs.rules.task import STOPPED_BY_ESTOP, TaskKind
from tunesmith.runs.tables import attempts, switches, tasks
from tunesmith.store.compiled_statements import CompiledStatement, insert_into, lease_now

ADD = CompiledStatement(
    insert_into(
        tasks,
        "id kind run_id profile priority payload available_clock available_at created_at",
        state="'waiting'",
        reason="''",
        num_attempts="0",
        num_crashes="0",
        num_errors="0",
        num_shrinks="0",
    )
)
START = CompiledStatement(insert_into(attempts, "id task_id number token worker_id started_at", state="'open'"))


_CLAIMED = (
    "id kind run_id profile state reason priority payload "
    "num_attempts num_crashes num_errors num_shrinks worker_id created_at"
)


@cache
def claim_first(kinds: frozenset[TaskKind]) -> CompiledStatement:
    """One statement finds, leases and returns a task; what the e-stop stops is left out in the same breath."""
    waiting = tasks.alias("waiting")
    estop = sa.exists().where(switches.c.name == sa.literal_column(f"'{ESTOP}'"), switches.c.is_on)
    first = (
        sa.select(waiting.c.seq)
        .where(
            waiting.c.state == sa.literal_column("'waiting'"),
            _is_one_of(waiting.c.kind, kinds),
            sa.or_(sa.not_(_is_one_of(waiting.c.kind, STOPPED_BY_ESTOP)), sa.not_(estop)),
            sa.or_(
                waiting.c.available_at.is_(None),
                waiting.c.available_clock != sa.bindparam("clock"),
                waiting.c.available_at <= lease_now(),
            ),
        )
        .order_by(waiting.c.priority, waiting.c.seq)
        .limit(sa.literal_column("1"))
        .with_for_update(skip_locked=True)  # PostgreSQL only: nobody waits for another's claim
    )
    return CompiledStatement(
        tasks.update()
        .where(tasks.c.seq == first.scalar_subquery())
        .values(
            state=sa.literal_column("'leased'"),
            lease_token=sa.bindparam("token"),
            lease_clock=sa.bindparam("clock"),
            lease_until=lease_now() + sa.bindparam("lease_s", type_=sa.Float()),
            worker_id=sa.bindparam("worker"),
            num_attempts=tasks.c.num_attempts + sa.literal_column("1"),
            available_clock=None,
            available_at=None,
        )
        .returning(*[tasks.c[name] for name in _CLAIMED.split()])
    )


def _is_one_of(column: sa.ColumnElement[str], kinds: Collection[TaskKind]) -> sa.ColumnElement[bool]:
    return column.in_([sa.literal_column(f"'{kind.value}'") for kind in sorted(kinds)])


_HELD = (
    tasks.c.id == sa.bindparam("task_id"),
    tasks.c.state == sa.literal_column("'leased'"),
    tasks.c.lease_token == sa.bindparam("token"),
)
HOLD = CompiledStatement(
    sa.select(tasks.c.num_crashes, tasks.c.num_errors, tasks.c.num_shrinks, attempts.c.state)
    .where(*_HELD, attempts.c.task_id == tasks.c.id, attempts.c.number == tasks.c.num_attempts)
    .with_for_update(of=tasks)
)
RENEW = CompiledStatement(
    tasks.update()
    .where(*_HELD)
    .values(
        lease_clock=sa.bindparam("clock"), lease_until=lease_now() + sa.bindparam("lease_s", type_=sa.Float())
    )
)  # fmt: skip
RELEASE = CompiledStatement(
    tasks.update()
    .where(*_HELD)
    .values(
        state=sa.bindparam("new_state"),
        reason=sa.bindparam("why"),
        lease_token=None,
        lease_clock=None,
        lease_until=None,
        payload=sa.func.coalesce(sa.bindparam("new_payload", type_=sa.JSON(none_as_null=True)), tasks.c.payload),
        **{name: sa.bindparam(f"new_{name}") for name in ("num_crashes", "num_errors", "num_shrinks")},
        **{name: sa.bindparam(f"new_{name}") for name in ("available_clock", "available_at")},
    )
)
CLOSE = CompiledStatement(
    attempts.update()
    .where(attempts.c.id == sa.bindparam("attempt_id"), attempts.c.state == sa.literal_column("'open'"))
    .values(
        {
            name: sa.bindparam(f"new_{name}", type_=attempts.c[name].type)
            for name in ("state", "error_class", "error", "result", "ended_at")
        }
    )
)
