"""Watch: one look at a fresh deployment, or at a candidate that answers mirrored traffic first."""

from __future__ import annotations

from datetime import timedelta

from tunesmith.deployment import queries as deployments
from tunesmith.deployment.reconcile import unhealthy_targets
from tunesmith.deployment.rules import quality_watch, shadow
from tunesmith.deployment.rules.drop_test import counts_of
from tunesmith.deployment.rules.quality_watch import AnswerWindow, QualityVerdict
from tunesmith.experience.queries import served_answers, traffic
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.experience.queries.served_answers import ServedAnswer
from tunesmith.experience.queries.traffic import Requests
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.profile import Watch
from tunesmith.profiles.sections.watch import QualityWatch
from tunesmith.programs.stage import Looked, StageContext, StageEnd
from tunesmith.runs.queries import requests, runs
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Tx
from tunesmith.verifiers.registry import monitors_among

_MAX_LIVE_ANSWERS = 2000
"""The first ones since the flip; a later drop is for the campaign's `quality` trigger to find."""
_SLOWEST_LOOKS_S = 60.0
_LOOKS = 60
"""A watch that has lasted longer is looked at less often: after so many parts of the time it has lasted."""


def watch(context: StageContext) -> StageEnd:
    """One look. The task waits between looks, so that watching for a day holds no worker."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        adapter = adapters.of_run(tx, run.id)
        deployment = deployments.get(tx, run.profile)
        wishes = [request.kind for request in requests.unanswered(tx, run.id)]
        now = tx.now
    if run.state is RunState.SHADOWING:
        return look_at_shadow(context)
    assert adapter is not None, run.id
    if deployment is None or adapter.state is not AdapterState.LIVE:
        return StageEnd.succeeded(Looked("moved_on", f"{adapter.name} is {adapter.state}"))
    policy = run.spec.watch
    watched_s = (now - run.moved_at).total_seconds()
    if strongest(wishes) is RequestKind.STOP:
        return StageEnd.succeeded(Looked("healthy", f"the watch was ended on request after {watched_s:.0f} s"))
    trouble = "; ".join(f"target {name}: {what}" for name, what in unhealthy_targets(context, run.profile).items())
    if trouble:
        num_failures = int(context.claim.task.payload.get("num_failures", 0)) + 1
        if num_failures >= policy.max_failures:
            return StageEnd.succeeded(Looked("roll_back", f"{num_failures} bad looks in a row: {trouble}"))
        return StageEnd.succeeded(Looked("again", trouble, num_failures))
    verdict = None
    if policy.for_s > 0.0:
        with context.database.read() as tx:
            verdict = look_at_answers(tx, adapter, deployment, watched_s, policy.quality)
    return StageEnd.succeeded(_looked(verdict, watched_s, policy))


def _looked(verdict: QualityVerdict | None, watched_s: float, policy: Watch) -> Looked:
    """What comes of a look at targets that are healthy; without a verdict, time alone decides."""
    evidence = () if verdict is None else tuple(each.as_json() for each in verdict.evidence)
    if verdict is not None and verdict.decision == "roll_back":
        return Looked("roll_back", verdict.reason, evidence=evidence)
    if watched_s < policy.for_s:
        return Looked("again", f"healthy, {policy.for_s - watched_s:.0f} s to go")
    if verdict is not None and verdict.decision == "again":
        pause_s = max(policy.interval_s, min(_SLOWEST_LOOKS_S, watched_s / _LOOKS))
        return Looked("again", f"healthy; {verdict.reason}", again_s=pause_s)
    said = "" if verdict is None else f"; {verdict.reason}"
    return Looked("healthy", f"healthy for {watched_s:.0f} s{said}", evidence=evidence)


def look_at_answers(
    tx: Tx, adapter: Adapter, deployment: deployments.Deployment, watched_s: float, policy: QualityWatch
) -> QualityVerdict:
    """Compare the answers since the flip with those of the version before; reads 3,000 rows of scores at most."""
    profile, flipped_at = adapter.profile, deployment.flipped_at
    previous_id = deployment.previous_adapter_id
    previous = f"{profile}@base" if previous_id is None else adapters.get(tx, previous_id).name
    since = flipped_at - timedelta(days=policy.window_days)
    old = served_answers.newest_before(tx, profile, previous, flipped_at, since=since, limit=policy.window_answers)
    new = served_answers.first_after(tx, profile, adapter.name, flipped_at, limit=_MAX_LIVE_ANSWERS)
    before = _window(previous, old, traffic.between(tx, profile, previous, since, flipped_at))
    live = _window(adapter.name, new, traffic.between(tx, profile, adapter.name, flipped_at, None))
    return quality_watch.judge(before, live, watched_s, policy)


def _window(version: str, answers: list[ServedAnswer], counted: Requests) -> AnswerWindow:
    """The values of every signal; monitors decide nothing here either."""
    names = served_answers.verifiers_of(answers)
    scores = {
        name: counts_of(answer.scores.get(name) for answer in answers) for name in sorted(names - monitors_among(names))
    }
    answered = {1.0: counted.num_answered, 0.0: counted.num_failed}
    return AnswerWindow(
        version,
        len(answers),
        verifiers=scores,
        finished=counts_of(float(answer.is_finished) for answer in answers),
        feedback=counts_of(answer.rating for answer in answers),
        requests={value: num for value, num in answered.items() if num},
        seconds=counted.seconds,
    )


def look_at_shadow(context: StageContext) -> StageEnd:
    """One look. The task waits between looks, so that shadowing for a day holds no worker."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        adapter = adapters.of_run(tx, run.id)
        wishes = [request.kind for request in requests.unanswered(tx, run.id)]
        observed = shadows.observed(tx, run.id)
        progress = shadows.progress(tx, run.id)
        now = tx.now
    assert adapter is not None, run.id
    if strongest(wishes) is RequestKind.CANCEL:
        return StageEnd.cancelled()
    if adapter.state in (AdapterState.LIVE, AdapterState.REVOKED):
        return StageEnd.succeeded(Looked("failed", f"{adapter.name} is {adapter.state}"))
    first_at = None if progress is None else progress.first_at
    seen = shadow.Shadowed(
        observed=observed,
        mirroring_s=0.0 if first_at is None else (now - first_at).total_seconds(),
        waiting_s=(now - run.moved_at).total_seconds(),
    )
    verdict = shadow.judge(seen, run.spec.shadow, run.spec.recipe.seed)
    return StageEnd.succeeded(Looked(verdict.decision, verdict.reason))
