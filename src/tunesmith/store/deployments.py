"""What is wanted live per profile, and what each target was last seen serving."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.adapter import AdapterState
from tunesmith.domain.gate import BARE_BASE
from tunesmith.domain.run import RunState
from tunesmith.errors import Refused
from tunesmith.store import adapters, events, runs
from tunesmith.store.database import Tx
from tunesmith.store.tables import deployments, observations, profiles


@dataclass(frozen=True)
class Deployment:
    profile: str
    wanted_adapter_id: str | None
    previous_adapter_id: str | None
    flipped_at: datetime
    flipped_by: str
    targets: list[dict[str, Any]]


@dataclass(frozen=True)
class Observation:
    profile: str
    target: str
    observed_adapter_id: str | None
    synced_at: datetime | None
    error: str | None


class LiveMoved(Refused):
    """What is live is not what the verdict compared with."""

    code = "live_moved"


def live_digest(tx: Tx, profile: str) -> str:
    """The digest of what is live, or the word for the bare base."""
    live = adapters.live(tx, profile)
    return BARE_BASE if live is None else live.digest


def flip(
    tx: Tx, adapter: adapters.Adapter, *, baseline: str, targets: list[dict[str, Any]], actor: str, reason: str
) -> None:
    """Make an adapter live by compare-and-swap: only if what is live is still the verdict's baseline."""
    lock(tx, adapter.profile)
    live = adapters.live(tx, adapter.profile)
    if live_digest(tx, adapter.profile) != baseline:
        raise LiveMoved(f"what is live for {adapter.profile} changed since the verdict")
    watched = runs.watching(tx, adapter.profile)
    if watched is not None:
        raise Refused(f"run {watched.id} is being watched; nothing is flipped until that is over")
    if live is not None and live.run_id is not None and runs.get(tx, live.run_id).state is RunState.DEPLOYING:
        # flipped a moment ago and not yet watched: were it replaced now, nobody would have looked at it
        raise Refused(f"run {live.run_id} is still being deployed; nothing is flipped until it has been watched")
    if live is not None:
        adapters.move(tx, live.id, AdapterState.SUPERSEDED, actor=actor, reason=f"replaced by {adapter.name}")
    adapters.move(tx, adapter.id, AdapterState.LIVE, actor=actor, reason=reason)
    _want(tx, adapter.profile, adapter.id, live.id if live else None, targets, actor)


def roll_back(tx: Tx, profile: str, *, actor: str, reason: str, to: adapters.Adapter | None = None) -> str | None:
    """Take the live adapter out and put the one before it (or `to`, or the bare base) in its place, in one step."""
    lock(tx, profile)
    live = adapters.live(tx, profile)
    if live is None:
        raise Refused(f"profile {profile} has no live adapter; there is nothing to roll back")
    deployment = get(tx, profile)
    if to is not None and to.profile != profile:
        raise Refused(f"adapter {to.name} is not of profile {profile}; nothing was rolled back")
    if to is not None and to.state is not AdapterState.SUPERSEDED:
        raise Refused(f"adapter {to.name} is {to.state}; only one that was live before can be rolled back to")
    target_id = to.id if to is not None else _usable_previous(tx, deployment)
    adapters.move(tx, live.id, AdapterState.ROLLED_BACK, actor=actor, reason=reason)
    if target_id is not None:
        adapters.move(tx, target_id, AdapterState.LIVE, actor=actor, reason=f"rolled back from {live.name}: {reason}")
    _want(tx, profile, target_id, None, deployment.targets if deployment else [], actor)
    return target_id


def _usable_previous(tx: Tx, deployment: Deployment | None) -> str | None:
    """N−1 where it can still be served, else the newest superseded version, else the bare base."""
    if deployment is None:
        return None
    if deployment.previous_adapter_id is not None:
        previous = adapters.get(tx, deployment.previous_adapter_id)
        if previous.state is AdapterState.SUPERSEDED:
            return previous.id
    return adapters.newest_superseded(tx, deployment.profile)


def lock(tx: Tx, profile: str) -> None:
    """Flips of one profile happen one after the other. Whoever needs a task's row too takes that one first.

    Rows that only refer to the profile may still be added: who submits a run has locked its dataset by then, and a
    roll-back locks that one after the profile, so each would wait for the other.
    """
    if tx.is_postgres:
        query = sa.select(profiles.c.name).where(profiles.c.name == profile)
        tx.first(query.with_for_update(key_share=True))


def _want(
    tx: Tx, profile: str, wanted: str | None, previous: str | None, targets: list[dict[str, Any]], actor: str
) -> None:
    tx.put(
        deployments,
        {"profile": profile},
        wanted_adapter_id=wanted,
        previous_adapter_id=previous,
        flipped_at=tx.now,
        flipped_by=actor,
        targets=targets,
    )
    events.record(tx, "deployment", profile, "wanted", actor=actor, detail={"wanted": wanted, "previous": previous})


def observe(tx: Tx, profile: str, target: str, *, adapter_id: str | None, error: str | None) -> None:
    """Note what a target serves now, or why that could not be found out or changed."""
    key = (observations.c.profile == profile, observations.c.target == target)
    before = tx.first(sa.select(observations).where(*key))
    if error is None:
        values: dict[str, Any] = {"observed_adapter_id": adapter_id, "synced_at": tx.now, "error": None}
    else:
        values = {"error": error}
    tx.put(observations, {"profile": profile, "target": target}, **values)
    changed = before is None or before["observed_adapter_id"] != adapter_id or before["error"] != error
    if changed:
        detail = {"target": target, "observed": adapter_id}
        events.record(tx, "deployment", profile, "observed", actor="target", reason=error or "", detail=detail)


def get(tx: Tx, profile: str) -> Deployment | None:
    row = tx.first(sa.select(deployments).where(deployments.c.profile == profile))
    return None if row is None else Deployment(**row)


def listing(tx: Tx) -> list[Deployment]:
    return [Deployment(**row) for row in tx.all(sa.select(deployments).order_by(deployments.c.profile))]


def observed(tx: Tx, profile: str) -> list[Observation]:
    query = sa.select(observations).where(observations.c.profile == profile).order_by(observations.c.target)
    return [Observation(**row) for row in tx.all(query)]
