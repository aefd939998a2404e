"""THE SPINE: what follows what.

A worker claims a task and runs its stage; the stage returns what happened; `settle` turns that into the run's next
state and the next task, in one transaction. Nothing else in tunesmith knows the order.

    train ──▶ evaluate ──▶ deploy ──▶ watch ──▶ deployed
      │           │           │          └────▶ rolled_back ──▶ (reconcile task)
      │           │           └──▶ held, or evaluate again if what is live moved
      │           ├──▶ shadow (a watch of mirrored traffic) ──▶ evaluate again · rejected
      │           └──▶ held · rejected · completed
      └──▶ queued again (retry, lost, interrupted) · paused · validated (dry run) · failed
"""

from __future__ import annotations

from typing import Any, assert_never

from tunesmith.core.disk import is_disk_trouble
from tunesmith.core.errors import StoreError
from tunesmith.datasets import queries as datasets
from tunesmith.deployment import queries as deployments
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.evaluate import Measured
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.experience.forgetting.queries import runs as forgotten_runs
from tunesmith.experience.queries import experiences, members
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration.taken_back import revoke_if_shown_worse, undo_learning
from tunesmith.profiles import queries as campaigns
from tunesmith.programs.stage import DeviceBusy, DryRunPassed, Flipped, Forbidden, Looked, NotFlipped, StageEnd, Trained
from tunesmith.runs.queries import requests, rounds, runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.queries.tasks import Claim, Task
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.rules.run import NO_EFFECT, PAUSED_ON_REQUEST, RunState, effect_of_end
from tunesmith.runs.rules.task import AttemptState, ErrorClass, RetryDecision, TaskKind, TaskState, backoff_s
from tunesmith.store.database import Tx

_WATCH_OPEN_RETRY_S = 5.0


def begin(tx: Tx, claim: Claim, *, actor: str) -> None:
    """A task was just claimed, in this transaction: a queued run is training now."""
    if claim.task.kind is TaskKind.TRAIN and claim.task.run_id is not None:
        reason = f"attempt {claim.attempt.number} on {actor}"
        runs.move(tx, claim.task.run_id, RunState.TRAINING, actor=actor, reason=reason, lease=claim.lease)


def settle(tx: Tx, claim: Claim, end: StageEnd, *, actor: str) -> None:
    """An attempt has ended: end it, move its task, move its run, open the next task. All or nothing.

    `end.fact` is what the stage found or made, `end.outcome` how the attempt ended, `end.result` what is kept about it.
    """
    if claim.task.kind is TaskKind.RECONCILE:
        _after_reconcile(tx, claim, end, actor)
        return
    if claim.task.run_id is None:
        _after_cycle(tx, claim, end, actor)
        return
    # from here on no request can come in: earlier ones count, however the stage ended
    tasks.require_lease(tx, claim.lease)
    run = runs.get(tx, claim.task.run_id)
    forgotten = None if _is_served(run, end) else forgotten_runs.why_ended(tx, run)
    if forgotten is not None:
        _cancel(tx, claim, run, actor, forgotten)
        return
    if (end.decided_by is RequestKind.CANCEL or requests.is_cancelled(tx, run.id)) and not is_too_late(tx, run):
        _cancel(tx, claim, run, actor)
        return
    match claim.task.kind:
        case TaskKind.TRAIN:
            _after_train(tx, claim, run, end, actor)
        case TaskKind.EVALUATE:
            _after_evaluate(tx, claim, run, end, actor)
        case TaskKind.DEPLOY:
            _after_deploy(tx, claim, run, end, actor)
        case TaskKind.WATCH if run.state is RunState.SHADOWING:
            _after_shadow(tx, claim, run, end, actor)
        case TaskKind.WATCH:
            _after_watch(tx, claim, run, end, actor)
        case TaskKind.CURRICULUM | TaskKind.PREPARE | TaskKind.EXPORT:
            _end_attempt(tx, claim, end, actor)
        case _:
            assert_never(claim.task.kind)


def _is_served(run: Run, end: StageEnd) -> bool:
    """Whether its adapter is, or may be, live: such a run goes on although one of its experiences was forgotten."""
    is_deploying = run.state is RunState.DEPLOYING and not isinstance(end.fact, NotFlipped)
    return is_deploying or run.state is RunState.WATCHING


def _after_train(tx: Tx, claim: Claim, run: Run, end: StageEnd, actor: str) -> None:
    requested = strongest([request.kind for request in requests.unanswered(tx, run.id)])
    resumable = end.outcome in (AttemptState.INTERRUPTED, AttemptState.LOST)
    if resumable and requested is RequestKind.PAUSE:
        _pause(tx, claim, run, end, actor, PAUSED_ON_REQUEST)
        return
    if isinstance(end.fact, Forbidden):
        _pause(tx, claim, run, end, actor, f"{end.fact.why}; mend that, then `run resume {run.id}`")
        return
    if isinstance(end.fact, DeviceBusy):
        tasks.defer_unstarted(tx, claim.lease, end.fact.again_s, actor=actor, reason=end.fact.reason)
        runs.move(tx, run.id, RunState.QUEUED, actor=actor, reason=end.fact.reason)
        return
    decision = _end_attempt(tx, claim, end, actor)
    if decision.state is TaskState.WAITING:
        runs.move(tx, run.id, RunState.QUEUED, actor=actor, reason=decision.reason)
        if requested is RequestKind.STOP:  # still wanted: the next attempt stops with a result
            requests.add(tx, run.id, RequestKind.STOP, actor=actor)
        return
    match end.fact:
        case Trained() as made:
            adapters.register(
                tx,
                run.profile,
                run_id=run.id,
                path=made.path,
                digest=made.digest,
                base_digest=run.spec.base.digest,
                metrics=made.metrics,
                actor=actor,
            )
            reason = "stopped early with the best so far" if made.stopped_early else "trained"
            if requested is RequestKind.PAUSE:  # it came while the result was saved
                runs.move(tx, run.id, RunState.PAUSED, actor=actor, reason=PAUSED_ON_REQUEST)
                requests.acknowledge_all(tx, run.id, actor=actor, answer="paused; training had ended")
                return
            requests.acknowledge_all(tx, run.id, actor=actor, answer=reason)
            go_on(tx, run, RunState.EVALUATING, TaskKind.EVALUATE, actor, reason)
        case DryRunPassed():
            finish(tx, run, RunState.VALIDATED, actor=actor, reason="the dry run found nothing wrong")
        case _:
            finish(tx, run, RunState.FAILED, actor=actor, reason=_why(end, decision.reason))


def _after_evaluate(tx: Tx, claim: Claim, run: Run, end: StageEnd, actor: str) -> None:
    if isinstance(end.fact, DeviceBusy):
        tasks.defer_unstarted(tx, claim.lease, end.fact.again_s, actor=actor, reason=end.fact.reason)
        return
    decision = _end_attempt(tx, claim, end, actor)
    if decision.state is TaskState.WAITING:
        return
    if not isinstance(end.fact, Measured):
        finish(tx, run, RunState.FAILED, actor=actor, reason=_why(end, decision.reason))
        return
    measured = end.fact
    evaluations.add(
        tx,
        measured.judged,
        run_id=run.id,
        adapter_id=measured.adapter_id,
        baseline_adapter_id=measured.baseline_adapter_id,
        scores_path=measured.scores_path,
        actor=actor,
    )
    verdict = measured.judged.verdict
    reason = "; ".join(verdict.reasons)
    if run.spec.deploys is not None and run.spec.deploy.when == "never":  # it was asked for its verdict only
        finish(tx, run, RunState.COMPLETED, actor=actor, reason=f"{verdict.decision}: {reason}")
        return
    match verdict.decision:
        case Decision.REJECT:
            finish(tx, run, RunState.REJECTED, actor=actor, reason=reason)
        case Decision.HOLD:
            _wait_for_a_person(tx, run, actor, reason)
        case Decision.PROMOTE if run.spec.deploy.when == "never":
            finish(tx, run, RunState.COMPLETED, actor=actor, reason=reason)
        case Decision.PROMOTE if run.spec.shadow.enabled and not shadows.has_passed(tx, run.id):
            go_on(tx, run, RunState.SHADOWING, TaskKind.WATCH, actor, f"promoted, shadows first: {reason}")
        case Decision.PROMOTE if run.spec.deploy.when == "approved":
            _wait_for_a_person(tx, run, actor, f"promoted, waits for approval: {reason}")
        case Decision.PROMOTE:
            go_on(tx, run, RunState.DEPLOYING, TaskKind.DEPLOY, actor, reason)
        case _:
            assert_never(verdict.decision)


def _after_deploy(tx: Tx, claim: Claim, run: Run, end: StageEnd, actor: str) -> None:
    if isinstance(end.fact, NotFlipped) and end.fact.kind == "later":
        tasks.reschedule(tx, claim.lease, _WATCH_OPEN_RETRY_S, actor=actor, reason=end.fact.why)
        return
    if run.automatic and end.error_class is ErrorClass.TRANSIENT and not is_too_late(tx, run):
        # nobody sits beside a round that opened itself: a server that is down today may be up tomorrow
        _try_again_later(tx, claim, end, actor)
        return
    decision = _end_attempt(tx, claim, end, actor)
    if decision.state is TaskState.WAITING:
        return
    match end.fact:
        case Flipped():
            go_on(tx, run, RunState.WATCHING, TaskKind.WATCH, actor, "live, and watched")
        case NotFlipped(why=why, kind="stale"):
            go_on(tx, run, RunState.EVALUATING, TaskKind.EVALUATE, actor, why)
        case NotFlipped(why=why, kind="revoked"):
            finish(tx, run, RunState.REJECTED, actor=actor, reason=why)
        case NotFlipped(why=why, kind="moved_on"):
            finish(tx, run, RunState.ROLLED_BACK, actor=actor, reason=why)
        case NotFlipped(why=why):
            _wait_for_a_person(tx, run, actor, why)
        case _:
            _take_back(tx, run, actor)
            _wait_for_a_person(tx, run, actor, _why(end, decision.reason))


def _after_shadow(tx: Tx, claim: Claim, run: Run, end: StageEnd, actor: str) -> None:
    if isinstance(end.fact, Looked) and end.fact.decision == "again":
        tasks.reschedule(tx, claim.lease, run.spec.shadow.interval_s, actor=actor, reason=end.fact.reason)
        return
    decision = _end_attempt(tx, claim, end, actor)
    if decision.state is TaskState.WAITING:
        return
    match end.fact:
        case Looked(decision="passed", reason=reason):
            go_on(tx, run, RunState.EVALUATING, TaskKind.EVALUATE, actor, f"shadowed well, measured again: {reason}")
        case Looked(reason=reason):
            finish(tx, run, RunState.REJECTED, actor=actor, reason=reason)
        case _:
            finish(tx, run, RunState.REJECTED, actor=actor, reason=_why(end, decision.reason))


def _after_watch(tx: Tx, claim: Claim, run: Run, end: StageEnd, actor: str) -> None:
    if isinstance(end.fact, Looked) and end.fact.decision == "again":
        payload = {"num_failures": end.fact.num_failures}
        delay_s = run.spec.watch.interval_s if end.fact.again_s is None else end.fact.again_s
        tasks.reschedule(tx, claim.lease, delay_s, actor=actor, reason=end.fact.reason, payload=payload)
        return
    decision = _end_attempt(tx, claim, end, actor)
    if decision.state is TaskState.WAITING:
        return
    match end.fact:
        case Looked(decision="healthy", reason=reason) as look:
            finish(tx, run, RunState.DEPLOYED, actor=actor, reason=reason, detail=look.detail)
        case Looked(decision="moved_on", reason=reason):
            finish(tx, run, RunState.ROLLED_BACK, actor=actor, reason=reason)
        case _:
            look = end.fact if isinstance(end.fact, Looked) else Looked("roll_back", _why(end, decision.reason))
            _take_back(tx, run, actor, look.reason)
            finish(tx, run, RunState.ROLLED_BACK, actor=actor, reason=look.reason, detail=look.detail)


def _after_reconcile(tx: Tx, claim: Claim, end: StageEnd, actor: str) -> None:
    """A reconcile that fails is tried again for ever, with backoff: what is live has changed in the store already."""
    if end.outcome in (AttemptState.SUCCEEDED, AttemptState.INTERRUPTED):
        _end_attempt(tx, claim, end, actor)
        return
    _try_again_later(tx, claim, end, actor)


def _try_again_later(tx: Tx, claim: Claim, end: StageEnd, actor: str) -> None:
    """However often: the pauses grow to five minutes."""
    num_failures = int(claim.task.payload.get("num_failures", 0)) + 1
    reason = f"{(end.error or end.outcome).splitlines()[0]}; tried again ({num_failures} failures so far)"
    payload = {"num_failures": num_failures}
    tasks.reschedule(
        tx, claim.lease, backoff_s(num_failures), actor=actor, reason=reason, payload=payload, outcome=end.outcome
    )


def _after_cycle(tx: Tx, claim: Claim, end: StageEnd, actor: str) -> None:
    """A curriculum belongs to no run; one with a local teacher may have to wait for the device."""
    if isinstance(end.fact, DeviceBusy):
        tasks.defer_unstarted(tx, claim.lease, end.fact.again_s, actor=actor, reason=end.fact.reason)
        return
    _end_attempt(tx, claim, end, actor)


def finish(tx: Tx, run: Run, state: RunState, *, actor: str, reason: str, detail: dict[str, Any] | None = None) -> None:
    """End a run. Deployed and completed ones consume their experiences, all others release them (`effect_of_end`).

    It is counted in its campaign, but not a second half (`campaign.start: both`) that lost to the first. The candidate
    of a rejected run is rejected.
    """
    runs.move(tx, run.id, state, actor=actor, reason=reason, detail=detail)
    requests.acknowledge_all(tx, run.id, actor=actor, answer=f"the run is {state}")
    effect = effect_of_end(state) if run.spec.deploys is None else NO_EFFECT  # that run has trained nothing
    adapter = adapters.of_run(tx, run.id)
    if state is RunState.REJECTED and adapter is not None and adapter.state is AdapterState.CANDIDATE:
        adapters.move(tx, adapter.id, AdapterState.REJECTED, actor=actor, reason=reason)
    datasets.lock(tx, run.dataset_id)
    if not run.spec.dry_run:  # a dry run has reserved nothing
        experiences.settle(
            tx,
            run.dataset_id,
            effect.data,
            actor=actor,
            run_id=run.id,
            adapter_id=None if adapter is None else adapter.id,
            last=runs.unfinished_on_dataset(tx, run.dataset_id) == 0,
        )
    if state is RunState.DEPLOYED and run.spec.deploys is not None:
        again = run.spec.deploys.id
        members.learn_again(tx, run.dataset_id, actor=actor, run_id=run.id, adapter_id=again)
        revoke_if_shown_worse(tx, run, actor=actor)
    is_beaten = state is RunState.REJECTED and rounds.is_beaten_half(tx, run)
    if run.campaign_id is not None and not is_beaten:
        campaigns.count_end(tx, run.campaign_id, effect.counters)


def roll_back(tx: Tx, profile: str, *, actor: str, reason: str, to: adapters.Adapter | None = None) -> str | None:
    """Move the pointer back in one step and open the task that brings the targets along; returns what is live now."""
    seen = adapters.live(tx, profile)
    watched = runs.watching(tx, profile)
    looking = None if watched is None else tasks.open_of_run(tx, watched.id, lock=True)
    deployments.lock(tx, profile)
    live = adapters.live(tx, profile)
    if seen is not None and (live is None or live.id != seen.id):
        raise deployments.LiveMoved(f"what is live for {profile} changed a moment ago; look again")
    now_live = deployments.roll_back(tx, profile, actor=actor, reason=reason, to=to)
    tasks.add(tx, TaskKind.RECONCILE, actor=actor, profile=profile, priority=0)
    assert live is not None
    undo_learning(tx, live, actor, reason)
    about = None if watched is None else adapters.of_run(tx, watched.id)
    if watched is not None and about is not None and about.id == live.id:
        _end_watch(tx, watched, looking, actor, reason)
    return now_live


def _end_watch(tx: Tx, run: Run, task: Task | None, actor: str, reason: str) -> None:
    """A watched adapter was rolled back by a person; if a worker is looking right now, its look will end the run."""
    if task is not None and task.state is TaskState.LEASED:
        return
    if task is not None:
        tasks.move(tx, task.id, TaskState.CANCELLED, actor=actor, reason=reason)
    finish(tx, run, RunState.ROLLED_BACK, actor=actor, reason=reason)


def _take_back(tx: Tx, run: Run, actor: str, reason: str = "it could not be deployed") -> None:
    """Undo the flip of this run, if it happened and nobody has undone it."""
    deployments.lock(tx, run.profile)
    adapter = adapters.of_run(tx, run.id)
    live = adapters.live(tx, run.profile)
    if adapter is not None and live is not None and live.id == adapter.id:
        deployments.roll_back(tx, run.profile, actor=actor, reason=reason)
        undo_learning(tx, adapter, actor, reason)
        tasks.add(tx, TaskKind.RECONCILE, actor=actor, profile=run.profile, priority=0)


def _end_attempt(tx: Tx, claim: Claim, end: StageEnd, actor: str) -> RetryDecision:
    """End the attempt. The retry table (`runs/rules/task.py`) decides: WAITING means that its task is tried again."""
    return tasks.end_attempt(
        tx, claim.lease, end.outcome, actor=actor, error_class=end.error_class, error=end.error, result=end.result
    )


def go_on(
    tx: Tx, run: Run, state: RunState, kind: TaskKind, actor: str, reason: str, payload: dict[str, Any] | None = None
) -> None:
    """A run's next state, and the task that does the work of it."""
    runs.move(tx, run.id, state, actor=actor, reason=reason)
    tasks.add(tx, kind, actor=actor, run_id=run.id, profile=run.profile, priority=run.priority, payload=payload)


def _wait_for_a_person(tx: Tx, run: Run, actor: str, reason: str) -> None:
    runs.move(tx, run.id, RunState.HELD, actor=actor, reason=reason)
    requests.acknowledge_all(tx, run.id, actor=actor, answer="the run is held")


def _pause(tx: Tx, claim: Claim, run: Run, end: StageEnd, actor: str, reason: str) -> None:
    tasks.end_by(tx, claim.lease, end.outcome, TaskState.CANCELLED, actor=actor, reason="paused")
    runs.move(tx, run.id, RunState.PAUSED, actor=actor, reason=reason)
    requests.acknowledge_all(tx, run.id, actor=actor, answer="paused")


def is_too_late(tx: Tx, run: Run) -> bool:
    """Whether a run has made its version live: what is wanted now is a roll-back."""
    adapter = adapters.of_run(tx, run.id) if run.state in (RunState.DEPLOYING, RunState.WATCHING) else None
    return adapter is not None and adapter.state is AdapterState.LIVE


def _cancel(tx: Tx, claim: Claim, run: Run, actor: str, reason: str = "cancelled on request") -> None:
    tasks.end_by(tx, claim.lease, AttemptState.CANCELLED, TaskState.CANCELLED, actor=actor, reason=reason)
    finish(tx, run, RunState.CANCELLED, actor=actor, reason=reason)


def _why(end: StageEnd, decision: str) -> str:
    """Why a run failed, in one line: the error itself first, then what the retry table made of it."""
    first = (end.error or "").strip().splitlines()
    return f"{first[0]} ({decision})" if first else decision


def settle_lost(tx: Tx, claim: Claim, *, actor: str) -> None:
    """The lease of an attempt ran out: take the task away from its holder and go on as the retry table says."""
    settle(tx, claim, StageEnd(AttemptState.LOST, error="the worker's lease ran out"), actor=actor)


def end_of_error(error: Exception) -> StageEnd:
    """A stage raised: that is an attempt that failed, never a worker that dies."""
    if is_disk_trouble(error):
        return StageEnd.no_room(f"{type(error).__name__}: {error}")
    kind = ErrorClass.TRANSIENT if isinstance(error, OSError | StoreError) else ErrorClass.BUG
    return StageEnd.failed(kind, f"{type(error).__name__}: {error}")
