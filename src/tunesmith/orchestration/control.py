"""What people can request of a run or an adapter: cancel, stop, pause, skip, resume, approve, force, reject, revoke.

A person holds no lease. If no worker holds the work, its state changes at once; on leased work a request is stored that
the worker acknowledges. None of them counts as an attempt.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import Refused
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.rules.forced import Forced
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.gate import missing_evidence
from tunesmith.experience.forgetting.queries import runs as forgotten_runs
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.runs.queries import requests, runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.request import ALLOWED_IN, INSTEAD, RequestKind, outranked, replaced_by
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import TaskKind, TaskState
from tunesmith.store import events
from tunesmith.store.database import Database, Tx


@dataclass(frozen=True)
class ActionResult:
    """The result of a request: carried out at once, or stored for the worker (`request_id`)."""

    run_id: str
    state: RunState
    request_id: str | None
    message: str


def request_action(tx: Tx, run_id: str, kind: RequestKind, *, actor: str, reason: str = "") -> ActionResult:
    """Cancel, stop, pause or skip a run, or request a checkpoint."""
    found = runs.find(tx, run_id)
    task = tasks.open_of_run(tx, found.id, lock=True)
    run = runs.get(tx, found.id)  # as it is while we hold its task: a worker may have moved it just before
    if run.state not in ALLOWED_IN[kind]:
        raise Refused(f"run {run.id} cannot be asked to {kind}: {_instead(run)}")
    if run.state is RunState.WATCHING:
        return _end_watch(tx, run, task, actor)
    if lifecycle.is_too_late(tx, run):
        undo = f"`adapter rollback {run.profile}` undoes that"
        raise Refused(f"it is too late to {kind} run {run.id}: its version is live; {undo}")
    if task is not None and task.state is TaskState.LEASED:
        if kind is RequestKind.SKIP:
            raise Refused(f"run {run.id} was just claimed by a worker; use `run cancel`")
        return _request_of_worker(tx, run, kind, actor)
    if kind not in (RequestKind.SKIP, RequestKind.CANCEL):
        raise Refused(f"run {run.id} has no worker that could {kind} it; check `run show`")
    end = RunState.SKIPPED if kind is RequestKind.SKIP else RunState.CANCELLED
    reason = reason or f"{end} by {actor}"
    if task is not None:
        tasks.move(tx, task.id, TaskState.CANCELLED, actor=actor, reason=reason)
    lifecycle.finish(tx, run, end, actor=actor, reason=reason)
    return ActionResult(run.id, end, None, end.value)


def _end_watch(tx: Tx, run: Run, task: tasks.Task | None, actor: str) -> ActionResult:
    """End a watch now and keep what is live: the next flip need not wait for it. A look under way ends it itself."""
    if not lifecycle.is_too_late(tx, run):
        raise Refused(f"the version of run {run.id} is not live any more; check `run show {run.id}`")
    if task is not None and task.state is TaskState.LEASED:
        return _request_of_worker(tx, run, RequestKind.STOP, actor)
    reason = f"the watch was ended by {actor}"
    if task is not None:
        tasks.move(tx, task.id, TaskState.CANCELLED, actor=actor, reason=reason)
    lifecycle.finish(tx, run, RunState.DEPLOYED, actor=actor, reason=reason)
    return ActionResult(run.id, RunState.DEPLOYED, None, reason)


def end_forgotten(database: Database, *, actor: str, dataset_ids: list[str] | None = None) -> list[str]:
    """End the unfinished runs that learn from what was forgotten; which ones.

    What nobody works on ends here. A worker ends the rest, and until then no result of it is believed.
    """
    with database.read() as tx:
        found = forgotten_runs.unfinished(tx, dataset_ids)
    for run, why in found:
        with suppress(Refused), database.write() as tx:  # Refused: it ended by itself at this moment
            request_action(tx, run.id, RequestKind.CANCEL, actor=actor, reason=why)
    return [run.id for run, _ in found]


def _request_of_worker(tx: Tx, run: Run, kind: RequestKind, actor: str) -> ActionResult:
    """Store a request for the worker. Raises Refused if it could not change anything any more."""
    unanswered = requests.unanswered(tx, run.id)
    kinds = [each.kind for each in unanswered]
    stronger = outranked(kind, kinds)
    if stronger is not None:
        instead = "" if stronger is RequestKind.CANCEL else "; `run cancel` ends it without a result"
        raise Refused(f"run {run.id} was asked to {stronger} already, so it cannot {kind} any more{instead}")
    request = requests.add(tx, run.id, kind, actor=actor)
    replaced = replaced_by(kind, kinds)
    for each in unanswered:
        if each.kind in replaced:
            requests.acknowledge(tx, each.id, actor=actor, answer=f"replaced: {actor} asked to {kind}")
    instead = f", not to {' or '.join(sorted(replaced))}" if replaced else ""
    return ActionResult(run.id, run.state, request.id, f"asked its worker to {kind}{instead}")


def resume(tx: Tx, run_id: str, *, actor: str) -> ActionResult:
    """Put a paused run back to work; it goes on from its last checkpoint. A pause that nobody carried out is taken
    back."""
    found = runs.find(tx, run_id)
    tasks.open_of_run(tx, found.id, lock=True)
    run = runs.get(tx, found.id)
    pause = next((each for each in requests.unanswered(tx, run.id) if each.kind is RequestKind.PAUSE), None)
    if run.state is RunState.TRAINING and pause is not None:
        requests.acknowledge(tx, pause.id, actor=actor, answer=f"taken back by {actor}")
        return ActionResult(run.id, run.state, None, "the pause is taken back; training goes on")
    if run.state is not RunState.PAUSED:
        raise Refused(f"run {run.id} is {run.state}, not paused: {_instead(run)}")
    if adapters.of_run(tx, run.id) is not None:  # it was paused while its result was saved
        return _send(tx, run, RunState.EVALUATING, TaskKind.EVALUATE, actor, "resumed; it had been trained")
    lifecycle.go_on(tx, run, RunState.QUEUED, TaskKind.TRAIN, actor, "resumed")
    return ActionResult(run.id, RunState.QUEUED, None, "queued")


def approve(tx: Tx, adapter: Adapter, *, actor: str) -> ActionResult:
    """A person lets a held adapter go live. Stale evidence is measured again first; missing evidence is refused."""
    run = _held_run(tx, adapter)
    _refuse_unusable(run, adapter)
    evaluation = evaluations.latest(tx, run.id)
    age_s = float("inf") if evaluation is None else (tx.now - evaluation.created_at).total_seconds()
    if evaluation is None or age_s > run.spec.gate.max_age_s:
        return _send(tx, run, RunState.EVALUATING, TaskKind.EVALUATE, actor, "approved, but the evidence is stale")
    missing = missing_evidence(evaluation.judged, run.spec.gate, run.spec.evaluation.metrics)
    if missing is not None:
        raise Refused(
            f"adapter {adapter.name} cannot be approved, because there is no evidence to approve it by: {missing}; "
            f"`adapter evaluate {adapter.name}` measures it again, and "
            f"`adapter deploy {adapter.name} --force --reason …` puts it live all the same"
        )
    return _send(tx, run, RunState.DEPLOYING, TaskKind.DEPLOY, actor, f"approved by {actor}")


def force(tx: Tx, adapter: Adapter, *, actor: str, reason: str) -> ActionResult:
    """A person lets a held adapter go live past the gate, with a reason that is kept. Targets may still refuse it."""
    run = _held_run(tx, adapter)
    _refuse_unusable(run, adapter)
    deployments.lock(tx, adapter.profile)
    forced = Forced(actor, reason, deployments.live_digest(tx, adapter.profile))
    events.record(tx, "adapter", adapter.id, "forced", actor=actor, reason=reason, detail={"run": run.id})
    why = f"forced past the gate by {actor}: {reason}"
    return _send(tx, run, RunState.DEPLOYING, TaskKind.DEPLOY, actor, why, forced.payload())


def is_held(tx: Tx, adapter: Adapter) -> bool:
    """Whether a run about it waits for a person."""
    return any(run.state is RunState.HELD for run in _runs_about(tx, adapter))


def evaluate_again(tx: Tx, adapter: Adapter, *, actor: str) -> ActionResult:
    """Measure a held adapter again, e.g. after the pool has grown."""
    return _send(tx, _held_run(tx, adapter), RunState.EVALUATING, TaskKind.EVALUATE, actor, f"asked again by {actor}")


def reject(tx: Tx, adapter: Adapter, *, actor: str, reason: str) -> ActionResult:
    """A person refuses a held adapter."""
    run = _held_run(tx, adapter)
    lifecycle.finish(tx, run, RunState.REJECTED, actor=actor, reason=reason or f"refused by {actor}")
    return ActionResult(run.id, RunState.REJECTED, None, "rejected")


def revoke(tx: Tx, adapter: Adapter, *, actor: str, reason: str) -> None:
    """Take an adapter out of service everywhere and for ever; if it is live, the one before it takes its place."""
    if adapter.state is AdapterState.LIVE:
        lifecycle.roll_back(tx, adapter.profile, actor=actor, reason=f"revoked: {reason}")
    adapters.move(tx, adapter.id, AdapterState.REVOKED, actor=actor, reason=reason)
    if deployments.get(tx, adapter.profile) is not None:
        deployments.request_reconcile(tx, adapter.profile, actor=actor, at_once=True)  # no target may hold it any more
    for run in _runs_about(tx, adapter):
        if run.state is RunState.HELD:
            lifecycle.finish(tx, run, RunState.REJECTED, actor=actor, reason=f"revoked: {reason}")


def expire_held(tx: Tx, *, actor: str) -> list[str]:
    """Reject held runs that nobody decided on in time."""
    expired = []
    for run in runs.listing(tx, states=frozenset({RunState.HELD}), limit=1000):
        if (tx.now - run.moved_at).total_seconds() > run.spec.gate.hold_expires_s:
            lifecycle.finish(tx, run, RunState.REJECTED, actor=actor, reason="held too long without a decision")
            expired.append(run.id)
    return expired


def _runs_about(tx: Tx, adapter: Adapter) -> list[Run]:
    return [] if adapter.run_id is None else runs.about(tx, adapter.run_id, adapter.id)


def _held_run(tx: Tx, adapter: Adapter) -> Run:
    about = _runs_about(tx, adapter)
    if not about:
        raise Refused(f"adapter {adapter.name} was not made by a run")
    held = next((run for run in about if run.state is RunState.HELD), None)
    if held is None:
        hint = f"; `adapter deploy {adapter.name}` asks for it to go live" if about[-1].state in RUN.finished else ""
        raise Refused(f"adapter {adapter.name} is not held: its run {about[-1].id} is {about[-1].state}{hint}")
    return held


def _refuse_unusable(run: Run, adapter: Adapter) -> None:
    """A version that this run has made live before, or that is revoked, does not go live by it."""
    if adapter.state is AdapterState.CANDIDATE:
        return
    if run.spec.deploys is None or adapter.state in (AdapterState.LIVE, AdapterState.REVOKED):
        again = "" if adapter.state is AdapterState.REVOKED else f", then `adapter deploy {adapter.name}`"
        raise Refused(
            f"adapter {adapter.name} is {adapter.state}; only a candidate can be approved: "
            f"`adapter reject {adapter.name}`{again}"
        )


def _send(
    tx: Tx,
    run: Run,
    state: RunState,
    kind: TaskKind,
    actor: str,
    reason: str,
    payload: dict[str, Any] | None = None,
) -> ActionResult:
    lifecycle.go_on(tx, run, state, kind, actor, reason, payload)
    return ActionResult(run.id, state, None, reason)


def _instead(run: Run) -> str:
    if run.state in RUN.finished:
        return f"it has ended ({run.state}); `run retry` opens a new one"
    return INSTEAD[run.state]
