"""Shadow: one look at what a candidate answered to mirrored traffic; enough and good, not good, or look again."""

from __future__ import annotations

from tunesmith.deployment.rules.shadow import Shadowed, judge
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.programs.stage import Looked, StageContext, StageEnd
from tunesmith.runs.queries import requests, runs
from tunesmith.runs.rules.request import RequestKind, strongest


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
