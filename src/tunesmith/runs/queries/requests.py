"""Requests of people on leased work, which the worker acknowledges."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tunesmith.core.ids import new_id
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.tables import requests
from tunesmith.store import events
from tunesmith.store.database import Tx

EXPIRES_AFTER = timedelta(hours=24)


@dataclass(frozen=True)
class Request:
    id: str
    run_id: str
    kind: RequestKind
    actor: str
    created_at: datetime
    expires_at: datetime
    acknowledged_at: datetime | None
    answer: str | None


def add(tx: Tx, run_id: str, kind: RequestKind, *, actor: str) -> Request:
    """Store a request; an equal open one is returned instead. Also closes expired requests."""
    for request in _open(tx, run_id):
        if request.expires_at <= tx.now:
            acknowledge(tx, request.id, actor=actor, answer="expired")
        elif request.kind == kind:
            return request
    request_id = new_id("req")
    tx.run(
        requests.insert().values(
            id=request_id,
            run_id=run_id,
            kind=kind,
            actor=actor,
            created_at=tx.now,
            expires_at=tx.now + EXPIRES_AFTER,
        )
    )
    events.record(tx, "run", run_id, "requested", actor=actor, detail={"request": request_id, "kind": kind})
    return get(tx, request_id)


def unanswered(tx: Tx, run_id: str) -> list[Request]:
    """Wishes on a run that still hold, oldest first."""
    return [request for request in _open(tx, run_id) if request.expires_at > tx.now]


def is_cancelled(tx: Tx, run_id: str) -> bool:
    """Whether somebody was told that the run is asked to cancel."""
    return strongest([request.kind for request in unanswered(tx, run_id)]) is RequestKind.CANCEL


def _open(tx: Tx, run_id: str) -> list[Request]:
    mine = (requests.c.run_id == run_id, requests.c.acknowledged_at.is_(None))
    return [_request(row) for row in tx.all(sa.select(requests).where(*mine).order_by(requests.c.seq))]


def acknowledge(tx: Tx, request_id: str, *, actor: str, answer: str) -> None:
    """Close a request with what came of it; acknowledging twice changes nothing."""
    moved = tx.run(
        requests.update()
        .where(requests.c.id == request_id, requests.c.acknowledged_at.is_(None))
        .values(acknowledged_at=tx.now, answer=answer)
    )
    if moved:
        run_id = get(tx, request_id).run_id
        events.record(tx, "run", run_id, "acknowledged", actor=actor, reason=answer, detail={"request": request_id})


def acknowledge_all(tx: Tx, run_id: str, *, actor: str, answer: str) -> None:
    """Close every open request of a run: its attempt has ended, or nobody works on it any more."""
    for request in _open(tx, run_id):
        acknowledge(tx, request.id, actor=actor, answer=answer)


def get(tx: Tx, request_id: str) -> Request:
    row = tx.first(sa.select(requests).where(requests.c.id == request_id))
    assert row is not None, request_id
    return _request(row)


def of_run(tx: Tx, run_id: str) -> list[Request]:
    query = sa.select(requests).where(requests.c.run_id == run_id).order_by(requests.c.seq)
    return [_request(row) for row in tx.all(query)]


def _request(row: sa.RowMapping) -> Request:
    fields: dict[str, Any] = {name: value for name, value in row.items() if name != "seq"}
    return Request(**{**fields, "kind": RequestKind(row["kind"])})
