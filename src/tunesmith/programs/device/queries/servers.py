"""Servers: who serves on which machine, with what, and whether it is still heard of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.programs.device.rules import ServerState
from tunesmith.programs.device.tables import servers
from tunesmith.store.database import Tx


@dataclass(frozen=True)
class Server:
    id: str
    host: str
    process: str
    """Its process identity, as JSON."""
    url: str
    device: str
    """What its engines compute on when they serve: cpu or cuda."""
    state: ServerState
    serving: dict[str, str | None]
    """By profile, the version that its name means there; None: the bare base."""
    counts: dict[str, int]
    started_at: datetime


def register(tx: Tx, server: Server, alive_s: float) -> None:
    """A server that begins; `started_at` is when the store heard of it."""
    values = {**vars(server), "started_at": tx.now}
    tx.run(servers.insert().values(**values, seen_clock=tx.lease_clock, seen_until=tx.lease_now + alive_s))


def heartbeat(
    tx: Tx,
    server_id: str,
    alive_s: float,
    *,
    state: ServerState,
    serving: Mapping[str, str | None],
    counts: Mapping[str, int],
) -> bool:
    """Renew a server's heartbeat and state. False if it is not registered (any more), so it has to register."""
    values: dict[str, Any] = {"state": state, "serving": dict(serving), "counts": dict(counts)}
    values |= {"seen_clock": tx.lease_clock, "seen_until": tx.lease_now + alive_s}
    return tx.run(servers.update().where(servers.c.id == server_id).values(**values)) == 1


def leave(tx: Tx, server_id: str) -> None:
    tx.run(servers.delete().where(servers.c.id == server_id))


def remove_expired(tx: Tx) -> int:
    """Remove servers whose heartbeat has expired: they were killed. Returns their number."""
    return tx.run(servers.delete().where(sa.not_(_alive(tx))))


def alive(tx: Tx) -> list[Server]:
    rows = tx.all(sa.select(servers).where(_alive(tx)).order_by(servers.c.started_at, servers.c.id))
    return [_server(row) for row in rows]


def _server(row: sa.RowMapping) -> Server:
    named = {name: row[name] for name in Server.__dataclass_fields__}
    return Server(**{**named, "state": ServerState(row["state"])})


def _alive(tx: Tx) -> sa.ColumnElement[bool]:
    return sa.and_(servers.c.seen_clock == tx.lease_clock, servers.c.seen_until > tx.lease_now)
