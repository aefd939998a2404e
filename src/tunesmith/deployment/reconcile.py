"""Reconcile: bring every target to what is wanted, look now and then whether it is still there, let old versions go."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from tunesmith.core import logs
from tunesmith.core.errors import LeaseLost, StoreError, TunesmithError
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.leased_target import HeldTarget
from tunesmith.deployment.parity import differs_after_loading
from tunesmith.deployment.serving_targets import Follower, followers, served_adapter
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
    followers: tuple[Follower, ...]
    is_under_way: bool
    """A deployment that its own task brings along, or that its watch looks at."""
    order: int
    """Grows with every change of what is wanted."""

    @property
    def asked(self) -> list[Follower]:
        """Those who can be asked now; a server that has given its device away follows the store when it is back."""
        return [each for each in self.followers if not each.is_busy]

    @property
    def digest(self) -> str:
        return BARE_BASE if self.live is None else self.live.digest

    @property
    def name(self) -> str:
        return "the bare base" if self.live is None else self.live.name


@dataclass(frozen=True)
class _Seen:
    """What one look at a target found."""

    digest: str | None = None
    """BARE_BASE for the bare base; None where it could not be asked."""
    loaded: frozenset[str] = frozenset()
    error: str | None = None


def roll_back(context: StageContext) -> StageEnd:
    """Bring the targets to what is wanted after the pointer moved, or a target did; goes on under e-stop."""
    assert context.claim.task.profile is not None
    error = reconcile(context, context.claim.task.profile)
    if error is not None:
        return StageEnd.failed(ErrorClass.TRANSIENT, error)
    return StageEnd.succeeded(Reconciled())


def reconcile(context: StageContext, profile: str) -> str | None:
    """Make every target serve what is wanted and note what it really serves; the first trouble, if any.

    What is wanted may move while a target is slow. Whoever moves a target looks once more after it, so the last one
    to do so has moved it to what is wanted then.
    """
    for _ in range(_MAX_ROUNDS):
        with context.database.read() as tx:
            wanted = _wanted(tx, context.workspace, profile)
        if wanted is None:
            return None
        settled = [(follower, _settle(context, wanted, follower)) for follower in wanted.asked]
        troubles = [trouble for _, trouble in settled if trouble is not None]
        if _MOVED in troubles:
            continue
        for follower in (each for each, trouble in settled if trouble is None):
            context.pulse.check()
            _let_go(context, wanted, follower)  # where it does not serve what is wanted, the old one may be all it has
            context.pulse.progress()
        return troubles[0] if troubles else None
    return "what is wanted keeps changing"


def _settle(context: StageContext, wanted: _Wanted, follower: Follower) -> str | None:
    """Bring one target to what is wanted; `_MOVED` if something else is wanted by now."""
    context.pulse.check()
    target: HeldTarget | None = None
    try:
        target = HeldTarget(context, follower, wanted.profile, wanted.order)
        error = _bring(context, wanted, follower, target)
    except LeaseLost:
        raise
    except TunesmithError as problem:
        error = problem.message
    try:
        with context.database.write() as tx:
            tasks.guard(tx, context.claim.lease)
            live = adapters.live(tx, wanted.profile)
            if (None if live is None else live.id) != (None if wanted.live is None else wanted.live.id):
                return _MOVED
            adapter_id = None if wanted.live is None else wanted.live.id
            is_known = error is None
            name = follower.name
            deployments.observe(tx, wanted.profile, name, adapter_id=adapter_id, is_known=is_known, error=error)
            deployments.forget_others(tx, wanted.profile, [each.name for each in wanted.followers])
    except LeaseLost as lost:
        if target is None or not target.may_have_flipped:
            raise
        _have_it_looked_at(context, wanted.profile)
        raise LeaseLost(
            f"{lost}; target {follower.name} may have been flipped to {wanted.name}: a task looks at it again"
        ) from lost
    context.pulse.progress()
    return None if error is None else f"target {follower.name}: {error}"


def _have_it_looked_at(context: StageContext, profile: str) -> None:
    """We moved a target after we had lost the task: whoever holds it may have been done before us."""
    with context.database.write() as tx:
        tasks.add(tx, TaskKind.ROLLBACK, actor=context.worker_id, profile=profile, priority=0)


def _bring(context: StageContext, wanted: _Wanted, follower: Follower, target: HeldTarget) -> str | None:
    """Load, flip, observe; why it does not serve what is wanted. Raises what a target says, and LeaseLost.

    A target that lost all it had may be another one by now, so it is compared again.

    One that still holds versions is not: a way back must not depend on anything.
    """
    live = wanted.live
    served = None if live is None else served_adapter(context.workspace, live)
    if live is not None and served is not None:
        has_lost_all = not target.loaded()
        target.load(served)
        if has_lost_all and (difference := differs_after_loading(context, live, follower, target)) is not None:
            return difference
    target.flip(served)
    observed = target.observe()
    return None if (observed or BARE_BASE) == wanted.digest else "it serves something else than what was asked for"


def _let_go(context: StageContext, wanted: _Wanted, follower: Follower) -> None:
    """Let answers of the old version end; unload what is neither wanted nor a way back. What is busy stays for now."""
    try:
        target = HeldTarget(context, follower, wanted.profile)
        loaded = target.loaded() - (wanted.kept - {wanted.previous})
    except TunesmithError:
        return  # told already, where it was brought along
    for name in sorted(loaded):
        try:
            with contextlib.suppress(*([TargetError] if name in wanted.revoked else [])):
                target.drain(name, _DRAIN_S)
            if name not in wanted.kept:
                target.unload(name)
        except TargetError as error:
            log.info("version_stays", profile=wanted.profile, target=follower.name, reason=error.message)


def look(context: StageContext, profile: str) -> dict[str, str]:
    """By target, what is wrong with it; nothing means healthy."""
    with context.database.read() as tx:
        wanted = _wanted(tx, context.workspace, profile)
    if wanted is None:
        return {}
    found = {each.name: _problem(wanted, _see(context.workspace, wanted, each)) for each in wanted.asked}
    return {name: problem for name, problem in found.items() if problem is not None}


def look_at_targets(database: Database, workspace: Workspace, *, actor: str) -> None:
    """One look at the targets of every deployment; a task brings back what is off. Never raises about a target."""
    with database.read() as tx:
        profiles = [deployment.profile for deployment in deployments.listing(tx)]
    for profile in profiles:
        with database.read() as tx:
            wanted = _wanted(tx, workspace, profile)
        if wanted is not None and not wanted.is_under_way:
            seen = {each.name: _see(workspace, wanted, each) for each in wanted.asked}
            with database.write(durable=False) as tx:
                _note(tx, wanted, seen, actor)


def _note(tx: Tx, wanted: _Wanted, seen: dict[str, _Seen], actor: str) -> None:
    """Keep the observations true, and have brought back what is off.

    A target that is down is tried again with growing pauses; once it answers, the pause is over.
    """
    live = adapters.live(tx, wanted.profile)
    if (None if live is None else live.id) != (None if wanted.live is None else wanted.live.id):
        return  # it moved while we looked, and whoever moved it brings the targets along
    problems = {name: _problem(wanted, one) for name, one in seen.items()}
    for name, one in seen.items():
        known = one.digest is not None
        adapter_id = _version_of(tx, wanted, one.digest)
        deployments.observe(
            tx, wanted.profile, name, adapter_id=adapter_id, is_known=known, error=problems[name]
        )  # fmt: skip
    deployments.forget_others(tx, wanted.profile, [each.name for each in wanted.followers])
    if any(problems[name] is not None and one.digest is not None for name, one in seen.items()):
        deployments.have_followed(tx, wanted.profile, actor=actor, at_once=True)
    elif any(problem is not None for problem in problems.values()):
        deployments.have_followed(tx, wanted.profile, actor=actor)
    else:
        deployments.hasten(tx, wanted.profile)


def _version_of(tx: Tx, wanted: _Wanted, digest: str | None) -> str | None:
    if digest is None or digest == BARE_BASE:
        return None
    if wanted.live is not None and wanted.live.digest == digest:
        return wanted.live.id
    found = adapters.by_digest(tx, wanted.profile, digest)
    return None if found is None else found.id


def _see(workspace: Workspace, wanted: _Wanted, follower: Follower) -> _Seen:
    try:
        target: Target = follower.target(workspace, wanted.profile)
        return _Seen(target.observe() or BARE_BASE, target.loaded())
    except StoreError:
        raise
    except TunesmithError as error:
        return _Seen(error=error.message)
    except Exception as error:  # a target of another package must not end a worker
        log.exception("target_failed", profile=wanted.profile, target=follower.name)
        return _Seen(error=f"{type(error).__name__}: {error}")


def _problem(wanted: _Wanted, seen: _Seen) -> str | None:
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
        followers=tuple(followers(tx, deployment.targets, workspace)),
        is_under_way=watched is not None or deployments.being_deployed(tx, live) is not None,
        order=deployment.order,
    )
