"""Hand-overs: who asked for a machine's device, who gave it, and whether anybody still needs it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.core.ids import new_id
from tunesmith.programs.device.rules import DEVICE_KINDS, HAND_OVER, HandOverState, ServerState, follows
from tunesmith.programs.device.tables import hand_overs, servers
from tunesmith.runs.rules.task import TaskKind, TaskState
from tunesmith.runs.tables import attempts, tasks, workers
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.lookup import get_one, move_guarded


@dataclass(frozen=True)
class HandOver:
    seq: int
    id: str
    host: str
    task_id: str
    server_id: str | None
    state: HandOverState
    reason: str
    requested_at: datetime
    given_at: datetime | None
    over_at: datetime | None


@dataclass(frozen=True)
class Server:
    """What a worker of the same machine needs to know about a server."""

    id: str
    process: str
    device: str
    state: ServerState
    reports: bool


@dataclass(frozen=True)
class Taker:
    """The task of a hand-over, as the store knows it; which of the processes still run only the machine can tell."""

    state: TaskState
    lease_left_s: float
    """How long the lease of a worker of this machine still runs; 0 without one."""
    holder: str | None
    """Process of the worker that has leased it."""
    program: str | None
    """Process of its last attempt."""
    workers: tuple[str, ...]
    """Processes of the workers of this machine that take such tasks."""
    is_followed: bool


def lock(tx: Tx, host: str) -> None:
    """Who decides about a machine's device does so one after the other."""
    if tx.is_postgres:
        tx.conn.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(f"tunesmith device {host}"))))


def request(tx: Tx, task_id: str, host: str, *, actor: str, reason: str) -> HandOver:
    """Ask for the device of a machine; asking twice is asking once."""
    found = of_task(tx, task_id)
    if found is not None and found.host == host:
        return found
    if found is not None:
        end(tx, found.id, actor=actor, reason=f"its task is tried on {host} now")
    hand_over_id = new_id("ho")
    tx.run(
        hand_overs.insert().values(
            id=hand_over_id,
            host=host,
            task_id=task_id,
            state=HandOverState.REQUESTED,
            reason=reason,
            requested_at=tx.now,
        )
    )
    moved = (None, HandOverState.REQUESTED)
    detail = {"task": task_id, "host": host}
    events.record(tx, "hand_over", hand_over_id, "requested", actor=actor, moved=moved, reason=reason, detail=detail)
    return get(tx, hand_over_id)


def give(tx: Tx, hand_over_id: str, *, server_id: str | None, actor: str, reason: str) -> None:
    """The device is free for this task; one that waits is due now."""
    task_id = _move(
        tx, hand_over_id, HandOverState.GIVEN, {"server_id": server_id, "given_at": tx.now}, actor, reason
    ).task_id
    waits = (tasks.c.id == task_id, sa.text("tasks.state = 'waiting'"))
    tx.run(tasks.update().where(*waits).values(available_clock=None, available_at=None))


def end(tx: Tx, hand_over_id: str, *, actor: str, reason: str) -> None:
    """Nobody needs the device for this any more, or it is taken back."""
    _move(tx, hand_over_id, HandOverState.OVER, {"over_at": tx.now}, actor, reason)


def _move(tx: Tx, hand_over_id: str, new: HandOverState, values: dict[str, Any], actor: str, reason: str) -> HandOver:
    """The one setter of a hand-over's state."""
    found = get(tx, hand_over_id)
    HAND_OVER.check(hand_over_id, found.state, new)
    move_guarded(tx, hand_overs, hand_over_id, found.state, state=new, reason=reason, **values)
    moved = (found.state, new)
    events.record(tx, "hand_over", hand_over_id, "moved", actor=actor, moved=moved, reason=reason)
    return found


def get(tx: Tx, hand_over_id: str) -> HandOver:
    return _hand_over(get_one(tx, hand_overs, hand_over_id))


def of_task(tx: Tx, task_id: str) -> HandOver | None:
    """The open hand-over of a task; at most one."""
    row = tx.first(sa.select(hand_overs).where(hand_overs.c.task_id == task_id, _OPEN))
    return None if row is None else _hand_over(row)


def open_on(tx: Tx, host: str) -> list[HandOver]:
    """What was asked for or given on a machine and is not over, the oldest first."""
    query = sa.select(hand_overs).where(hand_overs.c.host == host, _OPEN).order_by(hand_overs.c.seq)
    return [_hand_over(row) for row in tx.all(query)]


_OPEN = sa.text("hand_overs.state <> 'over'")  # as the partial index says it


def taker_of(tx: Tx, hand_over: HandOver) -> Taker:
    """What the store knows about the task a hand-over is for."""
    query = sa.select(tasks, workers.c.host.label("held_on"), workers.c.process.label("holder")).select_from(
        tasks.outerjoin(workers, workers.c.id == tasks.c.worker_id)
    )
    task = tx.first(query.where(tasks.c.id == hand_over.task_id))
    assert task is not None, hand_over.task_id  # a foreign key
    left_s = 0.0
    is_here = task["held_on"] in (hand_over.host, None)  # one that is not listed any more may still compute
    if is_here and task["state"] == TaskState.LEASED and task["lease_clock"] == tx.lease_clock:
        left_s = max(0.0, float(task["lease_until"]) - tx.lease_now)
    query = sa.select(attempts.c.process).where(attempts.c.task_id == hand_over.task_id)
    last = tx.first(query.order_by(attempts.c.number.desc()).limit(1))
    kinds = _open_kinds(tx, task["run_id"], hand_over.task_id)
    return Taker(
        state=TaskState(task["state"]),
        lease_left_s=left_s,
        holder=task["holder"],
        program=None if last is None else last["process"],
        workers=_workers(tx, hand_over.host, {TaskKind(task["kind"]), *kinds}),
        is_followed=follows(kinds),
    )


def _open_kinds(tx: Tx, run_id: str | None, task_id: str) -> set[TaskKind]:
    """What of the same run is open beside this task."""
    if run_id is None:
        return set()
    others = (tasks.c.run_id == run_id, tasks.c.id != task_id, sa.text("tasks.state IN ('waiting', 'leased')"))
    return {TaskKind(row["kind"]) for row in tx.all(sa.select(tasks.c.kind).where(*others))}


def _workers(tx: Tx, host: str, kinds: Collection[TaskKind]) -> tuple[str, ...]:
    wanted = DEVICE_KINDS.intersection(kinds)
    alive = (workers.c.host == host, workers.c.seen_clock == tx.lease_clock, workers.c.seen_until > tx.lease_now)
    rows = tx.all(sa.select(workers.c.kinds, workers.c.process).where(*alive).order_by(workers.c.id))
    return tuple(row["process"] for row in rows if wanted.intersection(row["kinds"]))


def servers_on(tx: Tx, host: str) -> list[Server]:
    """Every server that was started on a machine and has not left, silent ones too."""
    rows = tx.all(sa.select(servers).where(servers.c.host == host).order_by(servers.c.started_at))
    return [
        Server(
            id=row["id"],
            process=row["process"],
            device=row["device"],
            state=ServerState(row["state"]),
            reports=row["seen_clock"] == tx.lease_clock and row["seen_until"] > tx.lease_now,
        )
        for row in rows
    ]


def tell(tx: Tx, server_id: str, state: ServerState, *, actor: str, reason: str) -> None:
    """What a server does with its device from now on, beside what that means for the hand-overs."""
    row = tx.first(sa.select(servers.c.state).where(servers.c.id == server_id))
    if row is None or row["state"] == state:
        return
    tx.run(servers.update().where(servers.c.id == server_id).values(state=state))
    events.record(tx, "server", server_id, "moved", actor=actor, moved=(row["state"], state), reason=reason)


def end_left_behind(tx: Tx, host: str, *, actor: str) -> None:
    """Where no server is left to do so: end the hand-overs of tasks that are over."""
    done = sa.select(tasks.c.id).where(sa.text("tasks.state NOT IN ('waiting', 'leased')"))
    query = sa.select(hand_overs.c.id).where(hand_overs.c.host == host, _OPEN, hand_overs.c.task_id.in_(done))
    for row in tx.all(query):
        end(tx, row["id"], actor=actor, reason="its task is over")


def _hand_over(row: sa.RowMapping) -> HandOver:
    return HandOver(**{**row, "state": HandOverState(row["state"])})
