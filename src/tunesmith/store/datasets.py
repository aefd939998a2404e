"""Datasets and the held-out pool that accumulates from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.run import RunState
from tunesmith.errors import NotFound
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.runs import find_one
from tunesmith.store.tables import datasets, heldout_cases, runs

UNUSED_RESERVATION = timedelta(hours=24)
_PROVEN = (RunState.DEPLOYED, RunState.COMPLETED, RunState.WATCHING)


@dataclass(frozen=True)
class Dataset:
    id: str
    profile: str
    path: str
    fingerprint: str
    kind: str
    counts: dict[str, int]
    created_at: datetime
    reserved_until: datetime | None


@dataclass(frozen=True)
class HeldoutCase:
    id: str
    """The hash of its normalised prompt: one reference answer per prompt, the first one."""
    messages: list[dict[str, Any]]
    is_established: bool = False
    """It came with an earlier dataset that proved itself in a deployed or completed run."""


def add(
    tx: Tx, dataset_id: str, profile: str, *, path: str, fingerprint: str, kind: str, counts: dict[str, int], actor: str
) -> Dataset:
    tx.run(
        datasets.insert().values(
            id=dataset_id,
            profile=profile,
            path=path,
            fingerprint=fingerprint,
            kind=kind,
            counts=counts,
            created_at=tx.now,
            reserved_until=tx.now + UNUSED_RESERVATION,
        )
    )
    events.record(tx, "dataset", dataset_id, "prepared", actor=actor, detail={"fingerprint": fingerprint, **counts})
    return get(tx, dataset_id)


def get(tx: Tx, dataset_id: str) -> Dataset:
    row = tx.first(sa.select(datasets).where(datasets.c.id == dataset_id))
    if row is None:
        raise NotFound.named("dataset", dataset_id, hint="`tunesmith dataset list` shows them")
    return Dataset(**row)


def find(tx: Tx, text: str) -> Dataset:
    return Dataset(**find_one(tx, datasets, "ds", text))


def same_content(tx: Tx, profile: str, fingerprint: str) -> Dataset | None:
    """A dataset of this profile that holds exactly these examples."""
    query = sa.select(datasets).where(datasets.c.profile == profile, datasets.c.fingerprint == fingerprint)
    row = tx.first(query)
    return None if row is None else Dataset(**row)


def listing(tx: Tx, profile: str | None = None, limit: int = 100) -> list[Dataset]:
    query = sa.select(datasets).order_by(datasets.c.created_at.desc()).limit(limit)
    if profile is not None:
        query = query.where(datasets.c.profile == profile)
    return [Dataset(**row) for row in tx.all(query)]


def add_to_pool(tx: Tx, profile: str, dataset_id: str, cases: Iterable[HeldoutCase], cap: int) -> int:
    """Add new held-out cases to the profile's pool; over the cap, every age gives up the same share."""
    known = {row["case_id"] for row in tx.all(_pool_ids(profile))}
    fresh = [case for case in cases if case.id not in known]
    rows = [
        {
            "profile": profile,
            "case_id": case.id,
            "messages": case.messages,
            "dataset_id": dataset_id,
            "added_at": tx.now,
        }
        for case in fresh
    ]
    if rows:
        tx.conn.execute(heldout_cases.insert(), rows)
    _thin(tx, profile, cap)
    return len(rows)


def _thin(tx: Tx, profile: str, cap: int) -> None:
    """Keep `cap` cases spread evenly over the order they came in, so that old and new both stay represented."""
    ids = [row["seq"] for row in tx.all(_pool_ids(profile))]
    surplus = len(ids) - cap
    if surplus <= 0:
        return
    keep = {ids[index * len(ids) // cap] for index in range(cap)}
    dropped = [seq for seq in ids if seq not in keep]
    for start in range(0, len(dropped), 500):
        tx.run(heldout_cases.delete().where(heldout_cases.c.seq.in_(dropped[start : start + 500])))


def _pool_ids(profile: str) -> sa.Select[tuple[int, str]]:
    return (
        sa.select(heldout_cases.c.seq, heldout_cases.c.case_id)
        .where(heldout_cases.c.profile == profile)
        .order_by(heldout_cases.c.seq)
    )


def pool(tx: Tx, profile: str, dataset_id: str, limit: int) -> list[HeldoutCase]:
    """The cases that a run on this dataset is judged on: its own, and those of datasets that proved themselves.

    Cases of data that was never deployed stay out: a poisoned file must not become the yardstick of later rounds.
    Over the limit, cases are spread evenly over the order they came in.
    """
    proven = sa.select(runs.c.dataset_id).where(runs.c.profile == profile, runs.c.state.in_(_PROVEN))
    own = heldout_cases.c.dataset_id == dataset_id
    rows = tx.all(
        sa.select(heldout_cases.c.case_id, heldout_cases.c.messages, heldout_cases.c.dataset_id)
        .where(heldout_cases.c.profile == profile, sa.or_(own, heldout_cases.c.dataset_id.in_(proven)))
        .order_by(heldout_cases.c.seq)
    )
    chosen = rows if len(rows) <= limit else [rows[index * len(rows) // limit] for index in range(limit)]
    return [HeldoutCase(row["case_id"], row["messages"], row["dataset_id"] != dataset_id) for row in chosen]
