"""Reconcile: make every serving target serve the live version, check periodically that it does, unload old versions."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from tunesmith.core import logs
from tunesmith.core.errors import LeaseLost, StoreError, TunesmithError
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.leased_target import LeasedTarget
from tunesmith.deployment.parity import parity_problem_after_reload
from tunesmith.deployment.serving_targets import ServingTarget, served_adapter, serving_targets
from tunesmith.deployment.targets.base import Target, TargetError
from tunesmith.evaluation.rules.gate import BARE_BASE
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.stage import Reconciled, StageContext, StageEnd
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.rules.task import ErrorClass, TaskKind
from tunesmith.store.database import Database, Tx

_MAX_ROUNDS = 10
_DRAIN_S = 10.0
_MOVED = "something else is wanted by now"
log = logs.logger("reconcile")


@dataclass(frozen=True)
class _Wanted:
    """What every target of a profile should do."""

    profile: str
    live: Adapter | None
    previous: str | None
    kept: frozenset[str]
    revoked: frozenset[str]
    targets: tuple[ServingTarget, ...]
    is_under_way: bool
    """A deployment that its own task brings along, or that its watch looks at."""
    order: int
    """Grows with every change of what is wanted."""

    @property
    def available(self) -> list[ServingTarget]:
        """Targets that can be reached now. A server that has yielded its device reads the store when it is back."""
        return [each for each in self.targets if not each.is_busy]

    @property
    def digest(self) -> str:
        return BARE_BASE if self.live is None else self.live.digest

    @property
    def name(self) -> str:
        return "the bare base" if self.live is None else self.live.name


@dataclass(frozen=True)
class _Observed:
    """What one check of a target found."""

    digest: str | None = None
    """BARE_BASE for the bare base; None where it could not be asked."""
    loaded: frozenset[str] = frozenset()
    error: str | None = None


def reconcile_task(context: StageContext) -> StageEnd:
    """Reconcile the targets after the live version or a target changed. Runs under e-stop too."""
    assert context.claim.task.profile is not None
    error = reconcile(context, context.claim.task.profile)
    if error is not None:
        return StageEnd.failed(ErrorClass.TRANSIENT, error)
    return StageEnd.succeeded(Reconciled())


def reconcile(context: StageContext, profile: str) -> str | None:
    """Make every target serve the live version and record what it serves. Return the first problem, if any.

    The live version may change while a target is slow, so it is read again after every change of a target. The last
    worker to change a target has therefore flipped it to the version that is live by then.
    """
    for _ in range(_MAX_ROUNDS):
        with context.database.read() as tx:
            wanted = _wanted(tx, context.workspace, profile)
        if wanted is None:
            return None
        settled = [(serving, _settle(context, wanted, serving)) for serving in wanted.available]
        troubles = [trouble for _, trouble in settled if trouble is not None]
        if _MOVED in troubles:
            continue
        for serving in (each for each, trouble in settled if trouble is None):
            context.pulse.raise_if_lost()
            # only here: a target that does not serve what is wanted may have nothing but the old version
            _unload_old(context, wanted, serving)
            context.pulse.progress()
        return troubles[0] if troubles else None
    return "what is wanted keeps changing"


def _settle(context: StageContext, wanted: _Wanted, serving: ServingTarget) -> str | None:
    """Reconcile one target. Return its problem, or `_MOVED` if another version is live by now."""
    context.pulse.raise_if_lost()
    target: LeasedTarget | None = None
    try:
        target = LeasedTarget(context, serving, wanted.profile, wanted.order)
        error = _sync(context, wanted, serving, target)
    except LeaseLost:
        raise
    except TunesmithError as problem:
        error = problem.message
    try:
        with context.database.write() as tx:
            tasks.require_lease(tx, context.claim.lease)
            live = adapters.live(tx, wanted.profile)
            if (None if live is None else live.id) != (None if wanted.live is None else wanted.live.id):
                return _MOVED
            adapter_id = None if wanted.live is None else wanted.live.id
            is_known = error is None
            name = serving.name
            deployments.observe(tx, wanted.profile, name, adapter_id=adapter_id, is_known=is_known, error=error)
            deployments.remove_other_targets(tx, wanted.profile, [each.name for each in wanted.targets])
    except LeaseLost as lost:
        if target is None or not target.may_have_flipped:
            raise
        _request_reconcile(context, wanted.profile)
        raise LeaseLost(
            f"{lost}; target {serving.name} may have been flipped to {wanted.name}: a task looks at it again"
        ) from lost
    context.pulse.progress()
    return None if error is None else f"target {serving.name}: {error}"


def _request_reconcile(context: StageContext, profile: str) -> None:
    """Request another reconcile: a target was changed after losing the lease, perhaps after the new holder finished."""
    with context.database.write() as tx:
        tasks.add(tx, TaskKind.RECONCILE, actor=context.worker_id, profile=profile, priority=0)


def _sync(context: StageContext, wanted: _Wanted, serving: ServingTarget, target: LeasedTarget) -> str | None:
    """Load, flip, observe. Return why the target does not serve the live version. Raises TargetError and LeaseLost.

    Check parity again only if the target lost every adapter (it may run another model). Otherwise skip it, so that a
    rollback always works.
    """
    live = wanted.live
    served = None if live is None else served_adapter(context.workspace, live)
    if live is not None and served is not None:
        has_lost_all = not target.loaded()
        target.load(served)
        if has_lost_all and (difference := parity_problem_after_reload(context, live, serving, target)) is not None:
            return difference
    target.flip(served)
    observed = target.observe()
    return None if (observed or BARE_BASE) == wanted.digest else "it serves something else than what was asked for"


def _unload_old(context: StageContext, wanted: _Wanted, serving: ServingTarget) -> None:
    """Drain old versions, then unload those that are neither live nor needed for a rollback. Busy ones stay for now."""
    try:
        target = LeasedTarget(context, serving, wanted.profile)
        loaded = target.loaded() - (wanted.kept - {wanted.previous})
    except TunesmithError:
        return  # `_settle` has reported it
    for name in sorted(loaded):
        try:
            with contextlib.suppress(*([TargetError] if name in wanted.revoked else [])):
                target.drain(name, _DRAIN_S)
            if name not in wanted.kept:
                target.unload(name)
        except TargetError as error:
            log.info("version_stays", profile=wanted.profile, target=serving.name, reason=error.message)


def unhealthy_targets(context: StageContext, profile: str) -> dict[str, str]:
    """Return what is wrong with each unhealthy target, by its name."""
    with context.database.read() as tx:
        wanted = _wanted(tx, context.workspace, profile)
    if wanted is None:
        return {}
    found = {each.name: _problem(wanted, _observe(context.workspace, wanted, each)) for each in wanted.available}
    return {name: problem for name, problem in found.items() if problem is not None}


def check_targets(database: Database, workspace: Workspace, *, actor: str) -> None:
    """Check the targets of every deployment once, and open a task for those that differ. Never raises for a target."""
    with database.read() as tx:
        profiles = [deployment.profile for deployment in deployments.listing(tx)]
    for profile in profiles:
        with database.read() as tx:
            wanted = _wanted(tx, workspace, profile)
        if wanted is not None and not wanted.is_under_way:
            seen = {each.name: _observe(workspace, wanted, each) for each in wanted.available}
            with database.write(durable=False) as tx:
                _note(tx, wanted, seen, actor)


def _note(tx: Tx, wanted: _Wanted, seen: dict[str, _Observed], actor: str) -> None:
    """Record the observations, and request a reconcile where a target does not serve the live version.

    A target that is down is retried with backoff; once it answers, the backoff ends.
    """
    live = adapters.live(tx, wanted.profile)
    if (None if live is None else live.id) != (None if wanted.live is None else wanted.live.id):
        return  # another version went live meanwhile, and that flip reconciles the targets
    problems = {name: _problem(wanted, one) for name, one in seen.items()}
    for name, one in seen.items():
        known = one.digest is not None
        adapter_id = _version_of(tx, wanted, one.digest)
        deployments.observe(
            tx, wanted.profile, name, adapter_id=adapter_id, is_known=known, error=problems[name]
        )  # fmt: skip
    deployments.remove_other_targets(tx, wanted.profile, [each.name for each in wanted.targets])
    if any(problems[name] is not None and one.digest is not None for name, one in seen.items()):
        deployments.request_reconcile(tx, wanted.profile, actor=actor, at_once=True)
    elif any(problem is not None for problem in problems.values()):
        deployments.request_reconcile(tx, wanted.profile, actor=actor)
    else:
        deployments.retry_now(tx, wanted.profile)


def _version_of(tx: Tx, wanted: _Wanted, digest: str | None) -> str | None:
    if digest is None or digest == BARE_BASE:
        return None
    if wanted.live is not None and wanted.live.digest == digest:
        return wanted.live.id
    found = adapters.by_digest(tx, wanted.profile, digest)
    return None if found is None else found.id


def _observe(workspace: Workspace, wanted: _Wanted, serving: ServingTarget) -> _Observed:
    try:
        target: Target = serving.target(workspace, wanted.profile)
        return _Observed(target.observe() or BARE_BASE, target.loaded())
    except StoreError:
        raise
    except TunesmithError as error:
        return _Observed(error=error.message)
    except Exception as error:  # a target of another package must not end a worker
        log.exception("target_failed", profile=wanted.profile, target=serving.name)
        return _Observed(error=f"{type(error).__name__}: {error}")


def _problem(wanted: _Wanted, seen: _Observed) -> str | None:
    if seen.error is not None:
        return seen.error
    if seen.digest != wanted.digest:
        return f"it does not serve what is live, {wanted.name}"
    revoked = sorted(seen.loaded & wanted.revoked)
    return f"it still holds {revoked[0]}, which is revoked" if revoked else None


def _wanted(tx: Tx, workspace: Workspace, profile: str) -> _Wanted | None:
    deployment = deployments.get(tx, profile)
    if deployment is None:
        return None
    live, previous = adapters.live(tx, profile), deployments.pinned(tx, profile)
    watched = runs.watching(tx, profile)
    return _Wanted(
        profile=profile,
        live=live,
        previous=None if previous is None else previous.name,
        kept=deployments.kept(tx, profile),
        revoked=adapters.names_in(tx, profile, AdapterState.REVOKED),
        targets=tuple(serving_targets(tx, deployment.targets, workspace)),
        is_under_way=watched is not None or deployments.being_deployed(tx, live) is not None,
        order=deployment.order,
    )
