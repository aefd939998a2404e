"""Adapter versions: registering one, and the one setter of their state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tunesmith.core.errors import NotFound
from tunesmith.core.ids import new_id
from tunesmith.models.rules import ADAPTER, AdapterState, LiveMove, version_name
from tunesmith.models.tables import adapters
from tunesmith.profiles.tables import profiles
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.tables import runs
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.lookup import find_one, get_one, move_guarded


@dataclass(frozen=True)
class Adapter:
    id: str
    profile: str
    version: int
    state: AdapterState
    run_id: str | None
    path: str
    digest: str
    base_digest: str
    metrics: dict[str, float]
    created_at: datetime

    @property
    def name(self) -> str:
        return version_name(self.profile, self.version)


def register(
    tx: Tx,
    profile: str,
    *,
    run_id: str | None,
    path: str,
    digest: str,
    base_digest: str,
    metrics: dict[str, float],
    actor: str,
) -> Adapter:
    """A new candidate with the profile's next version number; the counter row makes two at once impossible."""
    adapter_id = new_id("ad")
    tx.run(profiles.update().where(profiles.c.name == profile).values(num_versions=profiles.c.num_versions + 1))
    version = tx.conn.execute(sa.select(profiles.c.num_versions).where(profiles.c.name == profile)).scalar_one()
    tx.run(
        adapters.insert().values(
            id=adapter_id,
            profile=profile,
            version=version,
            state=AdapterState.CANDIDATE,
            run_id=run_id,
            path=path,
            digest=digest,
            base_digest=base_digest,
            metrics=metrics,
            created_at=tx.now,
        )
    )
    moved = (None, AdapterState.CANDIDATE)
    events.record(tx, "adapter", adapter_id, "registered", actor=actor, moved=moved, detail={"digest": digest})
    return get(tx, adapter_id)


def move(tx: Tx, adapter_id: str, new: AdapterState, *, actor: str, reason: str) -> None:
    """The one setter of an adapter's state."""
    old = get(tx, adapter_id).state
    ADAPTER.check(adapter_id, old, new)
    move_guarded(tx, adapters, adapter_id, old, state=new)
    events.record(tx, "adapter", adapter_id, "moved", actor=actor, moved=(old, new), reason=reason)


def get(tx: Tx, adapter_id: str) -> Adapter:
    return _adapter(get_one(tx, adapters, adapter_id))


def find(tx: Tx, text: str) -> Adapter:
    """An adapter by id, by the beginning of one, or by its name (`profile@v7`)."""
    profile, at, version = text.partition("@v")
    if at and version.isdecimal() and len(version) < 10:
        row = tx.first(sa.select(adapters).where(adapters.c.profile == profile, adapters.c.version == int(version)))
        if row is None:
            raise NotFound.named("adapter", text, hint="`tunesmith adapter list` shows them")
        return _adapter(row)
    return _adapter(find_one(tx, adapters, "ad", text))


def of_run(tx: Tx, run_id: str) -> Adapter | None:
    """The version that a run made, or deploys again."""
    row = tx.first(sa.select(adapters).where(adapters.c.run_id == run_id))
    if row is not None:
        return _adapter(row)
    run = tx.first(sa.select(runs.c.spec).where(runs.c.id == run_id))
    deploys = None if run is None else run["spec"].get("deploys")
    return None if deploys is None else get(tx, deploys["id"])


def live(tx: Tx, profile: str) -> Adapter | None:
    """What is live now; None means the bare base."""
    row = tx.first(sa.select(adapters).where(adapters.c.profile == profile, sa.text("state = 'live'")))
    return None if row is None else _adapter(row)


def all_live(tx: Tx) -> list[Adapter]:
    """What is live now, of every profile that has something live."""
    return [_adapter(row) for row in tx.all(sa.select(adapters).where(sa.text("state = 'live'")))]


def by_ids(tx: Tx, ids: Collection[str]) -> list[Adapter]:
    return [_adapter(row) for row in tx.all(sa.select(adapters).where(adapters.c.id.in_(sorted(ids))))] if ids else []


def newest_superseded(tx: Tx, profile: str) -> str | None:
    """The last version that was live before and could be again."""
    mine = (adapters.c.profile == profile, adapters.c.state == AdapterState.SUPERSEDED)
    row = tx.first(sa.select(adapters.c.id).where(*mine).order_by(adapters.c.version.desc()).limit(1))
    return None if row is None else str(row["id"])


def under_way(tx: Tx, states: Collection[RunState], profile: str | None = None) -> list[tuple[str, Adapter]]:
    """Of the runs in some states, their ids and the versions they are about."""
    query = sa.select(runs.c.id).where(runs.c.state.in_(sorted(states))).order_by(runs.c.seq)
    if profile is not None:
        query = query.where(runs.c.profile == profile)
    found = [(str(row["id"]), of_run(tx, row["id"])) for row in tx.all(query)]
    return [(run_id, adapter) for run_id, adapter in found if adapter is not None]


def by_digest(tx: Tx, profile: str, digest: str) -> Adapter | None:
    """The newest version with that content; the same bytes may have been trained twice."""
    mine = (adapters.c.profile == profile, adapters.c.digest == digest)
    row = tx.first(sa.select(adapters).where(*mine).order_by(adapters.c.version.desc()).limit(1))
    return None if row is None else _adapter(row)


def names_in(tx: Tx, profile: str, state: AdapterState) -> frozenset[str]:
    """The names of all versions in a state."""
    query = sa.select(adapters.c.version).where(adapters.c.profile == profile, adapters.c.state == state)
    return frozenset(version_name(profile, row["version"]) for row in tx.all(query))


def live_moves(tx: Tx, profile: str) -> list[LiveMove]:
    """Every time that a version of a profile went live or stopped being it, in order."""
    table, live = events.events, AdapterState.LIVE.value
    query = (
        sa.select(table.c.at, adapters.c.id, adapters.c.version, table.c.new_state, table.c.actor, table.c.reason)
        .join(adapters, adapters.c.id == table.c.entity_id)
        .where(table.c.entity == "adapter", adapters.c.profile == profile)
        .where(sa.or_(table.c.new_state == live, table.c.old_state == live))
        .order_by(table.c.seq)
    )
    return [
        LiveMove(at, adapter_id, version, AdapterState(state), actor, reason)
        for at, adapter_id, version, state, actor, reason in tx.conn.execute(query)
    ]


def _adapter(row: sa.RowMapping) -> Adapter:
    return Adapter(**{**row, "state": AdapterState(row["state"])})
