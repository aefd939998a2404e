"""What becomes of a version that is taken back: its data is free again, its runs say so; one shown worse is revoked."""

from __future__ import annotations

from tunesmith.deployment import queries as deployments
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.experience.queries import members
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState, live_spans
from tunesmith.runs.queries import runs
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Tx


def undo_learning(tx: Tx, adapter: Adapter, actor: str, reason: str) -> None:
    """A version was rolled back: what it learnt from is free again, and its runs say what became of it."""
    members.unconsume(tx, adapter.id, actor=actor, reason=f"{adapter.name} was rolled back")
    for run in [] if adapter.run_id is None else runs.about(tx, adapter.run_id, adapter.id):
        if run.state is RunState.DEPLOYED:
            runs.move(tx, run.id, RunState.ROLLED_BACK, actor=actor, reason=reason)


def revoke_if_shown_worse(tx: Tx, run: Run, *, actor: str) -> None:
    """A version was put live again by its verdict: revoke the version that had replaced it and lost the comparison.

    Only where the gate promoted the older version against exactly that one: a person who forces a version past the
    gate has shown nothing.
    """
    spans, measured = live_spans(run.profile, adapters.live_moves(tx, run.profile)), evaluations.latest(tx, run.id)
    if len(spans) < 3 or measured is None or measured.judged.verdict.decision is not Decision.PROMOTE:
        return
    first, replaced, again = (span.adapter_id for span in spans[-3:])
    if first is None or first != again or again != measured.adapter_id or replaced != measured.baseline_adapter_id:
        return
    worse, better = adapters.get(tx, str(replaced)), adapters.get(tx, first)
    if worse.state is not AdapterState.SUPERSEDED:
        return
    why = "; ".join(measured.judged.verdict.reasons)
    which = f"{better.name}, which it had replaced"
    reason = f"a later evaluation ({measured.id}) shows it worse than {which}; {better.name} is {why}"
    adapters.move(tx, worse.id, AdapterState.REVOKED, actor=actor, reason=reason)
    undo_learning(tx, worse, actor, reason)
    deployments.request_reconcile(tx, run.profile, actor=actor, at_once=True)  # no target may hold it any more
