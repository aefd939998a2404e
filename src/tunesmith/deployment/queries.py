"""What is wanted live per profile, and what each target was last seen serving."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import Refused
from tunesmith.deployment.tables import deployments, observations
from tunesmith.evaluation.rules.gate import BARE_BASE
from tunesmith.experience.forgetting.queries import runs as forgotten_runs
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.tables import profiles
from tunesmith.runs.queries import runs
from tunesmith.runs.queries.tasks import add as add_task
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind, TaskState
from tunesmith.runs.tables import tasks
from tunesmith.store import events
from tunesmith.store.database import Tx


@dataclass(frozen=True)
class Deployment:
    profile: str
    wanted_adapter_id: str | None
    previous_adapter_id: str | None
    flipped_at: datetime
    flipped_by: str
    targets: list[dict[str, Any]]

    @property
    def order(self) -> int:
        """Grows with every change of what is wanted; a target refuses to be flipped for an earlier one."""
        return int(self.flipped_at.timestamp() * 1_000_000)


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
    check_flip(tx, adapter.profile, baseline)
    forgotten_runs.refuse_to_serve(tx, adapter)
    live = adapters.live(tx, adapter.profile)
    if live is not None and live.id == adapter.id:
        raise Refused(f"{adapter.name} is live already; it would replace itself, and the way back would be gone")
    if live is not None:
        adapters.move(tx, live.id, AdapterState.SUPERSEDED, actor=actor, reason=f"replaced by {adapter.name}")
    adapters.move(tx, adapter.id, AdapterState.LIVE, actor=actor, reason=reason)
    _want(tx, adapter.profile, adapter.id, live.id if live else None, targets, actor)


def check_flip(tx: Tx, profile: str, baseline: str) -> None:
    """Refuse where nothing may be flipped now: what is live moved on, or has not been watched to the end."""
    live = adapters.live(tx, profile)
    if live_digest(tx, profile) != baseline:
        raise LiveMoved(f"what is live for {profile} changed since the verdict")
    watched = runs.watching(tx, profile)
    if watched is not None:
        raise Refused(f"run {watched.id} is being watched; nothing is flipped until that is over")
    deploying = being_deployed(tx, live)
    if deploying is not None:
        # flipped a moment ago and not yet watched: were it replaced now, nobody would have looked at it
        raise Refused(f"run {deploying} is still being deployed; nothing is flipped until it has been watched")


def being_deployed(tx: Tx, live: adapters.Adapter | None) -> str | None:
    """The run that has made this version live and still switches the targets; None: there is none."""
    if live is None:
        return None
    under_way = adapters.under_way(tx, (RunState.DEPLOYING,), live.profile)
    return next((run_id for run_id, adapter in under_way if adapter.id == live.id), None)


def pinned(tx: Tx, profile: str) -> adapters.Adapter | None:
    """The version before: what a roll-back would put in place of what is live; None for the bare base."""
    previous = _usable_previous(tx, get(tx, profile))
    return None if previous is None else adapters.get(tx, previous)


def kept(tx: Tx, profile: str) -> frozenset[str]:
    """The versions that stay loaded: live, the one before, and candidates about to go live or shown traffic."""
    coming = [adapter for _, adapter in adapters.under_way(tx, (RunState.DEPLOYING, RunState.SHADOWING), profile)]
    found = (adapters.live(tx, profile), pinned(tx, profile), *coming)
    return frozenset(each.name for each in found if each is not None and each.state is not AdapterState.REVOKED)


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
    """The version before where it can still be served, else the newest superseded version, else the bare base."""
    if deployment is None:
        return None
    if deployment.previous_adapter_id is not None:
        previous = adapters.get(tx, deployment.previous_adapter_id)
        if previous.state is AdapterState.SUPERSEDED:
            return previous.id
    return adapters.newest_superseded(tx, deployment.profile)


def lock(tx: Tx, profile: str) -> None:
    """Lock the profile row to serialize flips. Lock order: task row, then profile row.

    Rows that only refer to the profile may still be added: who submits a run has locked its dataset by then, and a
    roll-back locks that one after the profile, so each would wait for the other.
    """
    if tx.is_postgres:
        query = sa.select(profiles.c.name).where(profiles.c.name == profile)
        tx.first(query.with_for_update(key_share=True))


def _want(
    tx: Tx, profile: str, wanted: str | None, previous: str | None, targets: list[dict[str, Any]], actor: str
) -> None:
    before = get(tx, profile)
    # a clock that was set back must not make this change look older than the last one: see `Deployment.order`
    now = tx.now if before is None else max(tx.now, before.flipped_at + timedelta(microseconds=1))
    tx.upsert(
        deployments,
        {"profile": profile},
        wanted_adapter_id=wanted,
        previous_adapter_id=previous,
        flipped_at=now,
        flipped_by=actor,
        targets=targets,
    )
    events.record(tx, "deployment", profile, "wanted", actor=actor, detail={"wanted": wanted, "previous": previous})


def request_reconcile(tx: Tx, profile: str, *, actor: str, at_once: bool = False) -> None:
    """Request a reconcile of the profile's targets: keep one such task open, due now with `at_once`."""
    if at_once:
        retry_now(tx, profile)
    lock(tx, profile)
    if tx.first(sa.select(tasks.c.id).where(*_open_reconciles(profile))) is None:
        add_task(tx, TaskKind.RECONCILE, actor=actor, profile=profile, priority=0)


def retry_now(tx: Tx, profile: str) -> None:
    """End the backoff of the profile's reconcile task: a target answers again."""
    paused = (*_open_reconciles(profile), tasks.c.state == TaskState.WAITING, tasks.c.available_at.is_not(None))
    tx.run(tasks.update().where(*paused).values(available_at=None, available_clock=None))


def _open_reconciles(profile: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Select the open reconcile tasks of a profile."""
    is_open = tasks.c.state.in_([TaskState.WAITING, TaskState.LEASED])
    return (tasks.c.profile == profile, tasks.c.kind == TaskKind.RECONCILE, is_open)


def observe(
    tx: Tx, profile: str, target: str, *, adapter_id: str | None = None, is_known: bool = True, error: str | None = None
) -> None:
    """Note what a target serves now, and what is wrong with that; where it cannot be asked, what it was last seen with.

    Written only where something changed, because targets are looked at for ever: `synced_at` is since when it is well.
    """
    key = (observations.c.profile == profile, observations.c.target == target)
    before = tx.first(sa.select(observations).where(*key))
    values: dict[str, Any] = {"error": error}
    if is_known:
        values["observed_adapter_id"] = adapter_id
    if before is not None and all(before[name] == value for name, value in values.items()):
        return
    observed = values.get("observed_adapter_id", before and before["observed_adapter_id"])
    if error is None:
        values["synced_at"] = tx.now
    tx.upsert(observations, {"profile": profile, "target": target}, **values)
    detail = {"target": target, "observed": observed}
    events.record(tx, "deployment", profile, "observed", actor="target", reason=error or "", detail=detail)


def remove_other_targets(tx: Tx, profile: str, targets: Collection[str]) -> None:
    """Remove the observations of targets that the profile no longer has."""
    others = (observations.c.profile == profile, observations.c.target.not_in(sorted(targets)))
    tx.run(observations.delete().where(*others))


def get(tx: Tx, profile: str) -> Deployment | None:
    row = tx.first(sa.select(deployments).where(deployments.c.profile == profile))
    return None if row is None else Deployment(**row)


def listing(tx: Tx) -> list[Deployment]:
    return [Deployment(**row) for row in tx.all(sa.select(deployments).order_by(deployments.c.profile))]


def observed(tx: Tx, profile: str) -> list[Observation]:
    query = sa.select(observations).where(observations.c.profile == profile).order_by(observations.c.target)
    return [Observation(**row) for row in tx.all(query)]
