"""One adapter version: its page, what is live, and a person's decisions about it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tunesmith.client.evaluation_view import evaluation_view
from tunesmith.client.views import AdapterView, DeploymentView, EventView, RequestResult, adapter_view, to_json
from tunesmith.core.errors import NotFound, Refused, UsageError, quoted
from tunesmith.deployment import queries as deployments
from tunesmith.evaluation import queries as evaluations
from tunesmith.models import listings
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState, LiveSpan, live_at, live_spans
from tunesmith.orchestration import control, lifecycle
from tunesmith.runs.base_check import base_trouble
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.queries import runs
from tunesmith.runs.session import Session
from tunesmith.store import events
from tunesmith.store.database import Tx


def show(session: Session, adapter: str) -> AdapterView:
    with session.database.read() as tx:
        found = adapters.find(tx, adapter)
        served_by = [each for each in deployments.observed(tx, found.profile) if _is_about(found, each)]
        history = events.of_entity(tx, "adapter", found.id)
        return replace(
            _listed(tx, session, found.id),
            targets=tuple(_observation(tx, each) for each in served_by),
            events=tuple(EventView(e.at, e.action, e.actor, e.old_state, e.new_state, e.reason) for e in history),
            evaluation=evaluation_view(evaluations.latest_of_adapter(tx, found.id)),
        )


def live(session: Session, profile: str) -> AdapterView | None:
    session.known_profile(profile)
    with session.database.read() as tx:
        live = adapters.live(tx, profile)
        return None if live is None else _listed(tx, session, live.id)


def deployment(session: Session, profile: str) -> DeploymentView:
    with session.database.read() as tx:
        if profiles.lock_of(tx, profile) is None:
            raise NotFound.named("deployment for profile", profile, hint="nothing was ever run for it")
        deployment = deployments.get(tx, profile)
        return DeploymentView(
            profile=profile,
            wanted=_name(tx, deployment.wanted_adapter_id if deployment else None),
            previous=_name(tx, deployment.previous_adapter_id if deployment else None),
            flipped_at=deployment.flipped_at if deployment else None,
            flipped_by=deployment.flipped_by if deployment else None,
            targets=tuple(_observation(tx, seen) for seen in deployments.observed(tx, profile)),
        )


def history(session: Session, profile: str, at: datetime | str | None) -> list[LiveSpan]:
    session.known_profile(profile)
    wanted = None if at is None else _instant(at)
    with session.database.read() as tx:
        spans = live_spans(profile, adapters.live_moves(tx, profile))
        if wanted is None:
            return spans
        if wanted > tx.now:
            raise UsageError(f"{wanted.isoformat()} is in the future: nobody knows yet what is live then")
        return [live_at(spans, wanted)]


def _instant(at: datetime | str) -> datetime:
    """An instant in UTC. Raises UsageError with how to write one."""
    try:
        found = at if isinstance(at, datetime) else datetime.fromisoformat(at.strip())
        aware = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return aware.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{quoted(str(at))} is not a time; write it as ISO 8601, e.g. 2026-11-17T14:00 (UTC), "
            "2026-11-17T14:00+01:00, or 2026-11-17 for 00:00 UTC of that day"
        ) from None


def approve(session: Session, adapter: str) -> RequestResult:
    _refuse_changed_base(session, adapter)
    with session.database.write() as tx:
        answer = control.approve(tx, adapters.find(tx, adapter), actor=session.actor)
    return RequestResult(answer.run_id, answer.state, answer.message)


def deploy(session: Session, adapter: str, *, force: bool = False, reason: str = "") -> RequestResult:
    from tunesmith.orchestration.redeploy import deploy_again

    if force and not reason.strip():
        raise UsageError("forcing a version past the gate needs a reason, which is kept: --reason TEXT")
    _refuse_changed_base(session, adapter)
    with session.database.write() as tx:
        found = adapters.find(tx, adapter)
        if control.is_held(tx, found):
            answer = (
                control.force(tx, found, actor=session.actor, reason=reason.strip())
                if force
                else control.approve(tx, found, actor=session.actor)
            )
            return RequestResult(answer.run_id, answer.state, answer.message)
    made = deploy_again(
        session.database,
        session.workspace,
        found.id,
        actor=session.actor,
        force=force,
        reason=reason.strip(),
        environ=session.environ,
    )
    return RequestResult(made.run_id, made.state, made.reason)


def evaluate(session: Session, adapter: str) -> RequestResult:
    from tunesmith.orchestration.redeploy import deploy_again

    _refuse_changed_base(session, adapter)
    with session.database.write() as tx:
        found = adapters.find(tx, adapter)
        if control.is_held(tx, found):
            answer = control.evaluate_again(tx, found, actor=session.actor)
            return RequestResult(answer.run_id, answer.state, answer.message)
    made = deploy_again(
        session.database,
        session.workspace,
        found.id,
        actor=session.actor,
        force=False,
        reason="",
        environ=session.environ,
        measure_only=True,
    )
    return RequestResult(made.run_id, made.state, made.reason)


def reject(session: Session, adapter: str, reason: str = "") -> RequestResult:
    with session.database.write() as tx:
        answer = control.reject(tx, adapters.find(tx, adapter), actor=session.actor, reason=reason)
    return RequestResult(answer.run_id, answer.state, answer.message)


def rollback(session: Session, profile: str, *, to: str | None = None, reason: str = "") -> str | None:
    session.known_profile(profile)
    with session.database.write() as tx:
        target = None if to is None else adapters.find(tx, to)
        if target is not None and target.profile != profile:
            raise NotFound(f"{target.name} is not an adapter of profile {profile}")
        actor = session.actor
        now_live = lifecycle.roll_back(tx, profile, actor=actor, reason=reason or f"asked by {actor}", to=target)
        return _name(tx, now_live)


def revoke(session: Session, adapter: str, reason: str) -> AdapterView:
    with session.database.write() as tx:
        found = adapters.find(tx, adapter)
        control.revoke(tx, found, actor=session.actor, reason=reason)
        return _listed(tx, session, found.id)


def _refuse_changed_base(session: Session, adapter: str) -> None:
    """Neither a verdict nor an approval holds for a base that is another one by now."""
    with session.database.read() as tx:
        found = adapters.find(tx, adapter)
        run = None if found.run_id is None else runs.get(tx, found.run_id)
    trouble = None if run is None else base_trouble(session.workspace, run.spec)
    if trouble is not None:
        raise Refused(f"adapter {found.name}: {trouble}")


def _listed(tx: Tx, session: Session, adapter_id: str) -> AdapterView:
    (found,) = listings.adapters(tx, adapter_id=adapter_id, limit=1)
    return adapter_view(found, session.workspace.data_dir)


def _observation(tx: Tx, seen: deployments.Observation) -> dict[str, Any]:
    live = adapters.live(tx, seen.profile)
    return {
        "target": seen.target,
        "wanted": None if live is None else live.name,
        "observed": _name(tx, seen.observed_adapter_id),
        "synced_at": to_json(seen.synced_at),
        "error": seen.error,
    }


def _is_about(adapter: Adapter, seen: deployments.Observation) -> bool:
    """Whether a target serves it, or should."""
    return adapter.state is AdapterState.LIVE or seen.observed_adapter_id == adapter.id


def _name(tx: Tx, adapter_id: str | None) -> str | None:
    return None if adapter_id is None else adapters.get(tx, adapter_id).name
