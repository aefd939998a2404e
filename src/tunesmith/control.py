"""What people may wish: cancel, stop, pause, skip, resume, approve, reject, retry.

A person holds no lease. On work nobody holds, the wish moves the state at once; on leased work it becomes a request
that the worker acknowledges. None of them burns an attempt.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from tunesmith import lifecycle
from tunesmith.domain.adapter import AdapterState
from tunesmith.domain.request import ALLOWED_IN, INSTEAD, RequestKind
from tunesmith.domain.run import RUN, RunState
from tunesmith.domain.task import TaskKind, TaskState
from tunesmith.errors import Refused
from tunesmith.store import adapters, deployments, evaluations, forgotten_runs, requests, runs, tasks
from tunesmith.store.adapters import Adapter
from tunesmith.store.database import Database, Tx
from tunesmith.store.runs import Run


@dataclass(frozen=True)
class Answer:
    """What came of a wish: done at once, or noted for the worker."""

    run_id: str
    state: RunState
    request_id: str | None
    message: str


def wish(tx: Tx, run_id: str, kind: RequestKind, *, actor: str, reason: str = "") -> Answer:
    """Cancel, stop, pause, skip, or ask for a checkpoint."""
    found = runs.find(tx, run_id)
    task = tasks.open_of_run(tx, found.id, lock=True)
    run = runs.get(tx, found.id)  # as it is while we hold its task: a worker may have moved it just before
    if run.state not in ALLOWED_IN[kind]:
        raise Refused(f"run {run.id} cannot be asked to {kind}: {_instead(run)}")
    if task is not None and task.state is TaskState.LEASED:
        if kind is RequestKind.SKIP:
            raise Refused(f"run {run.id} was just claimed by a worker; use `run cancel`")
        request = requests.add(tx, run.id, kind, actor=actor)
        return Answer(run.id, run.state, request.id, f"asked its worker to {kind}")
    if kind not in (RequestKind.SKIP, RequestKind.CANCEL):
        raise Refused(f"run {run.id} has no worker that could {kind} it; look again with `run show`")
    end = RunState.SKIPPED if kind is RequestKind.SKIP else RunState.CANCELLED
    reason = reason or f"{end} by {actor}"
    if task is not None:
        tasks.move(tx, task.id, TaskState.CANCELLED, actor=actor, reason=reason)
    lifecycle.finish(tx, run, end, actor=actor, reason=reason)
    return Answer(run.id, end, None, end.value)


def end_forgotten(database: Database, *, actor: str, dataset_ids: list[str] | None = None) -> list[str]:
    """End the unfinished runs that learn from what was forgotten; which ones.

    What nobody works on ends here. A worker ends the rest, and until then no result of it is believed.
    """
    with database.read() as tx:
        found = forgotten_runs.unfinished(tx, dataset_ids)
    for run, why in found:
        with suppress(Refused), database.write() as tx:  # Refused: it ended by itself at this moment
            wish(tx, run.id, RequestKind.CANCEL, actor=actor, reason=why)
    return [run.id for run, _ in found]


def resume(tx: Tx, run_id: str, *, actor: str) -> Answer:
    """Put a paused run back into the queue; it goes on from its last checkpoint."""
    run = runs.find(tx, run_id)
    if run.state is not RunState.PAUSED:
        raise Refused(f"run {run.id} is {run.state}, not paused: {_instead(run)}")
    runs.move(tx, run.id, RunState.QUEUED, actor=actor, reason="resumed")
    tasks.add(tx, TaskKind.TRAIN, actor=actor, run_id=run.id, profile=run.profile, priority=run.priority)
    return Answer(run.id, RunState.QUEUED, None, "queued")


def approve(tx: Tx, adapter: Adapter, *, actor: str) -> Answer:
    """A person lets a held adapter go live. Stale evidence is measured again first."""
    run = _held_run(tx, adapter)
    if adapter.state is not AdapterState.CANDIDATE:
        raise Refused(f"adapter {adapter.name} is {adapter.state}; only a candidate can be approved")
    evaluation = evaluations.latest(tx, run.id)
    age_s = float("inf") if evaluation is None else (tx.now - evaluation.created_at).total_seconds()
    if age_s > run.spec.gate.max_age_s:
        return _send(tx, run, RunState.EVALUATING, TaskKind.EVALUATE, actor, "approved, but the evidence is stale")
    return _send(tx, run, RunState.DEPLOYING, TaskKind.DEPLOY, actor, f"approved by {actor}")


def evaluate_again(tx: Tx, adapter: Adapter, *, actor: str) -> Answer:
    """Measure a held adapter again, e.g. after the pool has grown."""
    return _send(tx, _held_run(tx, adapter), RunState.EVALUATING, TaskKind.EVALUATE, actor, f"asked again by {actor}")


def reject(tx: Tx, adapter: Adapter, *, actor: str, reason: str) -> Answer:
    """A person refuses a held adapter."""
    run = _held_run(tx, adapter)
    lifecycle.finish(tx, run, RunState.REJECTED, actor=actor, reason=reason or f"refused by {actor}")
    return Answer(run.id, RunState.REJECTED, None, "rejected")


def revoke(tx: Tx, adapter: Adapter, *, actor: str, reason: str) -> None:
    """Take an adapter out of service everywhere and for ever; if it is live, the one before it takes its place."""
    if adapter.state is AdapterState.LIVE:
        lifecycle.roll_back(tx, adapter.profile, actor=actor, reason=f"revoked: {reason}")
    adapters.move(tx, adapter.id, AdapterState.REVOKED, actor=actor, reason=reason)
    if deployments.get(tx, adapter.profile) is not None:
        deployments.have_followed(tx, adapter.profile, actor=actor, at_once=True)  # no target may hold it any more
    run = None if adapter.run_id is None else runs.get(tx, adapter.run_id)
    if run is not None and run.state is RunState.HELD:
        lifecycle.finish(tx, run, RunState.REJECTED, actor=actor, reason=f"revoked: {reason}")


def expire_held(tx: Tx, *, actor: str) -> list[str]:
    """Reject held runs that nobody decided on in time."""
    expired = []
    for run in runs.listing(tx, states=frozenset({RunState.HELD}), limit=1000):
        if (tx.now - run.moved_at).total_seconds() > run.spec.gate.hold_expires_s:
            lifecycle.finish(tx, run, RunState.REJECTED, actor=actor, reason="held too long without a decision")
            expired.append(run.id)
    return expired


def _held_run(tx: Tx, adapter: Adapter) -> Run:
    if adapter.run_id is None:
        raise Refused(f"adapter {adapter.name} was not made by a run")
    run = runs.get(tx, adapter.run_id)
    if run.state is not RunState.HELD:
        raise Refused(f"adapter {adapter.name} is not held: its run {run.id} is {run.state}")
    return run


def _send(tx: Tx, run: Run, state: RunState, kind: TaskKind, actor: str, reason: str) -> Answer:
    runs.move(tx, run.id, state, actor=actor, reason=reason)
    tasks.add(tx, kind, actor=actor, run_id=run.id, profile=run.profile, priority=run.priority)
    return Answer(run.id, state, None, reason)


def _instead(run: Run) -> str:
    if run.state in RUN.finished:
        return f"it has ended ({run.state}); `run retry` opens a new one"
    return INSTEAD[run.state]
