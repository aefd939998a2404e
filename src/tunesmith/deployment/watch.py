"""Watch: one check of a fresh deployment, or of a candidate that answers mirrored traffic first."""

from __future__ import annotations

from tunesmith.deployment import queries as deployments
from tunesmith.deployment.reconcile import unhealthy_targets
from tunesmith.deployment.rules.shadow import Shadowed, judge
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.programs.stage import Looked, StageContext, StageEnd
from tunesmith.runs.queries import requests, runs
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.rules.run import RunState


def watch(context: StageContext) -> StageEnd:
    """One look. The task waits between looks, so that watching for a day holds no worker."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        adapter = adapters.of_run(tx, run.id)
        deployment = deployments.get(tx, run.profile)
        now = tx.now
    if run.state is RunState.SHADOWING:
        return look_at_shadow(context)
    assert adapter is not None, run.id
    if deployment is None or adapter.state is not AdapterState.LIVE:
        return StageEnd.succeeded(Looked("moved_on", f"{adapter.name} is {adapter.state}"))
    policy = run.spec.watch
    trouble = "; ".join(f"target {name}: {what}" for name, what in unhealthy_targets(context, run.profile).items())
    if trouble:
        num_failures = int(context.claim.task.payload.get("num_failures", 0)) + 1
        if num_failures >= policy.max_failures:
            return StageEnd.succeeded(Looked("roll_back", f"{num_failures} bad looks in a row: {trouble}"))
        return StageEnd.succeeded(Looked("again", trouble, num_failures))
    watched_s = (now - run.moved_at).total_seconds()
    if watched_s >= policy.for_s:
        return StageEnd.succeeded(Looked("healthy", f"healthy for {watched_s:.0f} s"))
    return StageEnd.succeeded(Looked("again", f"healthy, {policy.for_s - watched_s:.0f} s to go"))


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
    seen = Shadowed(
        observed=observed,
        mirroring_s=0.0 if first_at is None else (now - first_at).total_seconds(),
        waiting_s=(now - run.moved_at).total_seconds(),
    )
    verdict = judge(seen, run.spec.shadow, run.spec.recipe.seed)
    return StageEnd.succeeded(Looked(verdict.decision, verdict.reason))
