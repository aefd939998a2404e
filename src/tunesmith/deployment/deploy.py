"""Deploy: check on every target that it can serve the adapter and answers as the trainer did; make it live in the
store; switch the targets.

    for every target: limits and trial load ─▶ load beside what is served ─▶ parity
                                    │                                          │
                                    └───────────── refused: held ◀─────────────┘
    one compare-and-swap in the store                    ◀─ from here on the new version is what is wanted
    for every target: flip ─▶ observe ─▶ drain the old ─▶ unload what is neither wanted nor the version before

Each step can be repeated: a crash between two leaves old or new, never neither. See docs/decisions/0016.
"""

from __future__ import annotations

import contextlib

from tunesmith.core.disk import is_disk_trouble, says_disk_trouble
from tunesmith.core.errors import DataError, Refused
from tunesmith.core.files import verify_folder
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.leased_target import LeasedTarget
from tunesmith.deployment.parity import ParityProbe, probe, references_of
from tunesmith.deployment.reconcile import reconcile
from tunesmith.deployment.rules.forced import forced_by
from tunesmith.deployment.serving_targets import ServingTarget, served_adapter, serving_targets
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.evaluate import policy_digest
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.resolve import why_no_runs
from tunesmith.programs.readings import References
from tunesmith.programs.stage import Flipped, NotFlipped, StageContext, StageEnd
from tunesmith.runs.base_check import base_trouble
from tunesmith.runs.queries import requests, runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.store.database import Tx

_WAS_LIVE = "was_live"


class _Cancelled(Exception):
    """Somebody asked for that before the flip."""


class _Stale(Refused):
    """The verdict is not about what would be flipped."""

    code = "stale"


def deploy(context: StageContext) -> StageEnd:
    """Make the run's adapter live, or find out why not."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        adapter = adapters.of_run(tx, run.id)
        is_cancelled = requests.is_cancelled(tx, run.id)
    assert adapter is not None, run.id
    probed: dict[str, ParityProbe] = {}
    if adapter.state is not AdapterState.LIVE:
        if is_cancelled:
            return StageEnd.cancelled()
        ended = _make_live(context, run, adapter, probed)
        if ended is not None:
            return ended
    context.pulse.progress()
    trouble = reconcile(context, run.profile)
    if trouble is not None:
        return (
            StageEnd.no_room(trouble) if says_disk_trouble(trouble) else StageEnd.failed(ErrorClass.TRANSIENT, trouble)
        )
    return StageEnd.succeeded(Flipped(), {"parity": {name: each.numbers for name, each in probed.items()}})


def _make_live(context: StageContext, run: Run, adapter: Adapter, probed: dict[str, ParityProbe]) -> StageEnd | None:
    """Check, try on every target, flip. Returns None once the adapter is live, else how the deployment ends."""
    try:
        obstacle = _obstacle(context, run, adapter) or _try_everywhere(context, run, adapter, probed)
    except TargetError as error:
        if is_disk_trouble(error):
            return StageEnd.no_room(error.message)
        return StageEnd.failed(ErrorClass.TRANSIENT, error.message)
    try:
        obstacle = obstacle or _flip(context, run, adapter, probed)
    except _Cancelled:
        _withdraw_all(context, run, adapter)
        return StageEnd.cancelled()
    return None if obstacle is None else StageEnd.succeeded(obstacle)


def _obstacle(context: StageContext, run: Run, adapter: Adapter) -> NotFlipped | None:
    """What profile, base and store say against a flip, before any target is asked."""
    forbidden = why_no_runs(context.workspace, run.profile)
    if forbidden is not None:
        return NotFlipped(f"{forbidden}; fix that, then `adapter approve {adapter.name}`", "refused")
    if adapter.state is AdapterState.REVOKED:
        return NotFlipped(f"{adapter.name} is revoked and cannot go live", "revoked")
    if context.claim.task.payload.get(_WAS_LIVE) or (
        run.spec.deploys is None and adapter.state is not AdapterState.CANDIDATE
    ):
        return NotFlipped(f"{adapter.name} was live already and is {adapter.state} since", "moved_on")
    changed = base_trouble(context.workspace, run.spec)
    if changed is not None:
        return NotFlipped(f"{changed}, then approve it: tunesmith adapter approve {adapter.name}", "refused")
    with context.database.read() as tx:
        try:
            deployments.check_flip(tx, run.profile, _baseline(tx, context, run, adapter))
        except (_Stale, deployments.LiveMoved) as error:
            return NotFlipped(str(error), "stale")
        except Refused as error:
            return NotFlipped(str(error), "later")
    return None


def _try_everywhere(
    context: StageContext, run: Run, adapter: Adapter, probed: dict[str, ParityProbe]
) -> NotFlipped | None:
    """Load the adapter on every target beside what is served, and check parity. Returns the first refusal, or None.

    Raises TargetError.
    """
    served = served_adapter(context.workspace, adapter)
    try:
        verify_folder(served.path, served.digest)
    except (DataError, OSError) as error:
        return NotFlipped(f"the adapter is not what was evaluated: {error}", "refused")
    with context.database.read() as tx:
        every = serving_targets(tx, run.spec.targets, context.workspace)
        references = references_of(context.workspace, evaluations.latest_of_adapter(tx, adapter.id))
    busy = next((serving.name for serving in every if serving.is_busy), None)
    if busy is not None:
        return NotFlipped(f"{busy} has given its device away for a while; it is asked when it has it back", "later")
    for number, serving in enumerate(every, start=1):
        context.pulse.raise_if_lost()
        refusal = _try(context, run.profile, serving, served, references, probed)
        if refusal is not None:
            _withdraw(context, run.profile, every[:number], served)
            return NotFlipped(f"target {serving.name} {refusal}", "refused")
        context.pulse.progress()
    return None


def _try(
    context: StageContext,
    profile: str,
    serving: ServingTarget,
    served: ServedAdapter,
    references: References | None,
    probed: dict[str, ParityProbe],
) -> str | None:
    """One target: limits and trial load, load, parity."""
    target = LeasedTarget(context, serving, profile)
    try:
        refusal = target.refusal(served)
        if refusal is not None:
            return f"cannot load it: {refusal}"
        target.load(served)
        context.pulse.progress()
        probed[serving.name] = found = probe(target, serving, served, references)
    except TargetError as error:
        raise TargetError(f"target {serving.name}: {error.message}") from error
    return None if found.refusal is None else f"does not answer as it was trained: {found.refusal}"


def _withdraw_all(context: StageContext, run: Run, adapter: Adapter) -> None:
    with context.database.read() as tx:
        every = serving_targets(tx, run.spec.targets, context.workspace)
    _withdraw(context, run.profile, every, served_adapter(context.workspace, adapter))


def _withdraw(context: StageContext, profile: str, tried: list[ServingTarget], served: ServedAdapter) -> None:
    """Unload the refused version. What cannot be unloaded now, the next deployment unloads."""
    for serving in tried:
        with contextlib.suppress(TargetError):
            LeasedTarget(context, serving, profile).unload(served.name)


def _flip(context: StageContext, run: Run, adapter: Adapter, probed: dict[str, ParityProbe]) -> NotFlipped | None:
    """The compare-and-swap. The verdict must be about this adapter, this policy and what is live now."""
    parity = "; ".join(f"{name} {each.told}" for name, each in probed.items())
    forced = forced_by(context.claim.task.payload)
    forbidden = why_no_runs(context.workspace, run.profile)  # targets may have taken long
    if forbidden is not None:
        return NotFlipped(forbidden, "refused")
    try:
        with context.database.write() as tx:
            tasks.note(tx, context.claim.lease, **{_WAS_LIVE: True})
            if requests.is_cancelled(tx, run.id):  # whoever asks after this transaction is told that it is too late
                raise _Cancelled
            deployments.flip(
                tx,
                adapter,
                baseline=_baseline(tx, context, run, adapter),
                targets=[target.model_dump(mode="json") for target in run.spec.targets],
                actor=context.worker_id if forced is None else forced.by,
                reason=f"run {run.id}{forced or ''}; parity: {parity}",
            )
    except (_Stale, deployments.LiveMoved) as error:
        return NotFlipped(str(error), "stale")
    except Refused as error:
        return NotFlipped(str(error), "later")
    return None


def _baseline(tx: Tx, context: StageContext, run: Run, adapter: Adapter) -> str:
    """What the verdict compared with, or what was live when a person forced it; raises where neither counts."""
    forced = forced_by(context.claim.task.payload)
    if forced is not None:
        return forced.baseline
    evaluation = evaluations.latest(tx, run.id)
    if evaluation is None:
        raise _Stale("there is no evaluation")
    if evaluation.judged.verdict.decision is Decision.REJECT:
        raise _Stale("the latest verdict is against it")
    evidence = evaluation.judged.evidence
    if evidence.adapter != adapter.digest or evidence.policy != policy_digest(run.spec):
        raise _Stale("the verdict is about something else")
    if (tx.now - evaluation.created_at).total_seconds() > run.spec.gate.max_age_s:
        raise _Stale("the verdict is older than gate.max_age_s")
    return evidence.baseline
