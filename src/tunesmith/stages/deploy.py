"""Deploy: trial load, flip by compare-and-swap, bring every target to what is wanted."""

from __future__ import annotations

from typing import Any

from tunesmith.config.workspace import Workspace
from tunesmith.domain.adapter import AdapterState
from tunesmith.domain.profile import Target as TargetConfig
from tunesmith.domain.request import RequestKind, strongest
from tunesmith.domain.task import ErrorClass, TaskKind
from tunesmith.errors import DataError, LeaseLost, Refused, TunesmithError
from tunesmith.files import verify_folder
from tunesmith.stages.context import Flipped, NotFlipped, Reconciled, StageContext, StageEnd
from tunesmith.stages.evaluate import policy_digest
from tunesmith.store import adapters, deployments, evaluations, requests, runs, tasks
from tunesmith.store.adapters import Adapter
from tunesmith.store.runs import Run
from tunesmith.targets.base import ServedAdapter, Target, TargetError
from tunesmith.targets.registry import make_target

_MAX_ROUNDS = 10
_MOVED = "something else is wanted by now"


def deploy(context: StageContext) -> StageEnd:
    """Make the run's adapter live. Each step can be repeated: a crash between two leaves old or new, never neither."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        adapter = adapters.of_run(tx, run.id)
        wishes = [request.kind for request in requests.unanswered(tx, run.id)]
    assert adapter is not None, run.id
    if adapter.state not in (AdapterState.CANDIDATE, AdapterState.LIVE):
        return StageEnd.succeeded(NotFlipped(f"{adapter.name} is {adapter.state} and cannot go live", "refused"))
    if adapter.state is AdapterState.CANDIDATE:
        if strongest(wishes) is RequestKind.CANCEL:
            return StageEnd.cancelled()
        refusal = _trial(context, run, adapter)
        if refusal is not None:
            return StageEnd.succeeded(NotFlipped(refusal, "refused"))
        obstacle = _flip(context, run, adapter)
        if obstacle is not None:
            return StageEnd.succeeded(obstacle)
    context.pulse.progress()
    error = reconcile(context, run.profile)
    if error is not None:
        return StageEnd.failed(ErrorClass.TRANSIENT, error)
    return StageEnd.succeeded(Flipped())


def roll_back(context: StageContext) -> StageEnd:
    """Bring the targets to what is wanted after the pointer moved back; goes on under e-stop."""
    assert context.claim.task.profile is not None
    error = reconcile(context, context.claim.task.profile)
    if error is not None:
        return StageEnd.failed(ErrorClass.TRANSIENT, error)
    return StageEnd.succeeded(Reconciled())


def _trial(context: StageContext, run: Run, adapter: Adapter) -> str | None:
    """Why a target cannot serve the adapter; nothing that is served changes."""
    served = served_adapter(context.workspace, adapter)
    try:
        verify_folder(served.path, served.digest)
    except (DataError, OSError) as error:
        return f"the adapter is not what was evaluated: {error}"
    for config in run.spec.targets:
        context.pulse.check()
        refusal = target_of(context.workspace, run.profile, config.model_dump()).refusal(served)
        if refusal is not None:
            return f"target {config.name} cannot load it: {refusal}"
        context.pulse.progress()
    return None


def _flip(context: StageContext, run: Run, adapter: Adapter) -> NotFlipped | None:
    """The compare-and-swap. The verdict must be about this adapter, this policy and what is live now."""
    try:
        with context.database.write() as tx:
            tasks.guard(tx, context.claim.lease)
            evaluation = evaluations.latest(tx, run.id)
            if evaluation is None:
                return NotFlipped("there is no evaluation", "stale")
            evidence = evaluation.judged.evidence
            if evidence.adapter != adapter.digest or evidence.policy != policy_digest(run.spec):
                return NotFlipped("the verdict is about something else", "stale")
            if (tx.now - evaluation.created_at).total_seconds() > run.spec.gate.max_age_s:
                return NotFlipped("the verdict is older than gate.max_age_s", "stale")
            deployments.flip(
                tx,
                adapter,
                baseline=evidence.baseline,
                targets=[target.model_dump(mode="json") for target in run.spec.targets],
                actor=context.worker_id,
                reason=f"run {run.id}",
            )
    except deployments.LiveMoved as error:
        return NotFlipped(str(error), "stale")
    except Refused as error:
        return NotFlipped(str(error), "later")
    return None


def reconcile(context: StageContext, profile: str) -> str | None:
    """Make every target serve what is wanted and note what it really serves; the first trouble, if any.

    What is wanted may move while a target is slow. Whoever moves a target looks once more after it, so the last one
    to do so has moved it to what is wanted then.
    """
    for _ in range(_MAX_ROUNDS):
        with context.database.read() as tx:
            deployment = deployments.get(tx, profile)
            wanted = adapters.live(tx, profile)
        if deployment is None:
            return None
        served = None if wanted is None else served_adapter(context.workspace, wanted)
        troubles = [_settle(context, profile, config, wanted, served) for config in deployment.targets]
        if _MOVED not in troubles:
            return next((trouble for trouble in troubles if trouble is not None), None)
    return "what is wanted keeps changing"


def _settle(
    context: StageContext, profile: str, config: dict[str, Any], wanted: Adapter | None, served: ServedAdapter | None
) -> str | None:
    """Bring one target to what is wanted; `_MOVED` if something else is wanted by now."""
    context.pulse.check()
    error = _bring(target_of(context.workspace, profile, config), served)
    try:
        with context.database.write() as tx:
            tasks.guard(tx, context.claim.lease)
            adapter_id = None if wanted is None else wanted.id
            now_wanted = adapters.live(tx, profile)
            if adapter_id != (None if now_wanted is None else now_wanted.id):
                return _MOVED
            deployments.observe(tx, profile, config["name"], adapter_id=adapter_id, error=error)
    except LeaseLost:
        _have_it_looked_at(context, profile)
        raise
    context.pulse.progress()
    return None if error is None else f"target {config['name']}: {error}"


def _have_it_looked_at(context: StageContext, profile: str) -> None:
    """We moved a target after we had lost the task: whoever holds it may have been done before us."""
    with context.database.write() as tx:
        tasks.add(tx, TaskKind.ROLLBACK, actor=context.worker_id, profile=profile, priority=0)


def _bring(target: Target, served: ServedAdapter | None) -> str | None:
    try:
        if served is not None:
            target.load(served)
        target.flip(served)
        observed = target.observe()
    except TargetError as error:
        return str(error)
    wanted = None if served is None else served.digest
    return None if observed == wanted else "it serves something else than what was asked for"


def look(context: StageContext, profile: str, target_config: dict[str, Any]) -> str | None:
    """What is wrong with a target that should serve what is live; None means healthy."""
    with context.database.read() as tx:
        digest = deployments.live_digest(tx, profile)
    try:
        observed = target_of(context.workspace, profile, target_config).observe()
    except TunesmithError as error:
        return str(error)
    return None if (observed or "base") == digest else "it does not serve what is live"


def served_adapter(workspace: Workspace, adapter: Adapter) -> ServedAdapter:
    return ServedAdapter(name=adapter.name, path=workspace.data_dir / adapter.path, digest=adapter.digest)


def target_of(workspace: Workspace, profile: str, config: dict[str, Any]) -> Target:
    parsed = TargetConfig.model_validate(config)
    return make_target(parsed.kind, parsed.options, root=workspace.root, profile=profile)
