"""Deploy again: a version that is there already becomes what a new run is about. It trains nothing.

The run is judged by the profile's gate as it is now against what is live now, then deployed and watched like any other.
A person may force it past the gate with a reason; a disabled profile, another base and a target still refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import Refused
from tunesmith.core.files import canonical_json, sha256_text
from tunesmith.core.ids import new_id
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.rules.forced import Forced
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.orchestration.check import check
from tunesmith.orchestration.judged_by import judged_by
from tunesmith.orchestration.workspace_commit import with_commit
from tunesmith.profiles.profile import Deploy
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.runs.queries import runs
from tunesmith.runs.rules.run import RUN, Priority, RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.spec import AdapterRef, Fingerprints, RunSpec, base_of
from tunesmith.runs.spec_paths import with_stored_paths
from tunesmith.store import events
from tunesmith.store.database import Database, Tx

_WAS_SERVED = frozenset({AdapterState.SUPERSEDED, AdapterState.ROLLED_BACK})


@dataclass(frozen=True)
class DeployedAgain:
    run_id: str
    state: RunState
    reason: str


def deploy_again(
    database: Database,
    workspace: Workspace,
    adapter_id: str,
    *,
    actor: str,
    force: bool,
    reason: str,
    environ: Mapping[str, str] | None = None,
    measure_only: bool = False,
) -> DeployedAgain:
    """Queue a run that brings a version live: measured first, or, where it is forced, deployed at once.

    With `measure_only` it ends with the verdict, and nothing goes live.
    """
    with database.read() as tx:
        adapter = adapters.get(tx, adapter_id)
        _refuse(tx, adapter)
    spec = _spec(database, workspace, adapter, environ)
    if measure_only:
        spec = spec.model_copy(update={"deploy": Deploy(when="never")})
    with database.write() as tx:
        deployments.lock(tx, adapter.profile)
        adapter = adapters.get(tx, adapter_id)
        _refuse(tx, adapter)
        return _queue(tx, adapter, spec, actor, force=force, reason=reason)


def _refuse(tx: Tx, adapter: Adapter) -> None:
    """What can never go live again, is live, or is about to be decided on."""
    if adapter.state is AdapterState.LIVE:
        raise Refused(f"adapter {adapter.name} is live already")
    if adapter.state is AdapterState.REVOKED:
        raise Refused(f"adapter {adapter.name} is revoked, and that is for ever; train a new one: `run submit`")
    if adapter.run_id is None:
        raise Refused(f"adapter {adapter.name} was not made by a run, so nothing says how to judge it")
    for run in runs.about(tx, adapter.run_id, adapter.id):
        if run.state not in RUN.finished:
            raise Refused(
                f"run {run.id} is about {adapter.name} and is {run.state}; "
                f"wait for its end, or `run cancel {run.id}` first"
            )


def _spec(database: Database, workspace: Workspace, adapter: Adapter, environ: Mapping[str, str] | None) -> RunSpec:
    """The spec that made it, under what the profile says now about judging, serving and watching."""
    assert adapter.run_id is not None
    with database.read() as tx:
        made_by = runs.get(tx, adapter.run_id).spec
    checked, _, _ = check(database, workspace, adapter.profile, environ=environ)
    base, profile = base_of(checked), checked.profile
    if base.digest != adapter.base_digest:
        raise Refused(f"adapter {adapter.name} was trained on another base than profile {profile.name} has now")
    changes: dict[str, Any] = {
        "run_id": new_id("run"),
        "campaign_id": None,
        "base": base,
        "start": None,
        "deploys": AdapterRef(id=adapter.id, path=str(workspace.data_dir / adapter.path), digest=adapter.digest),
        **judged_by(workspace, profile),
        "shadow": profile.shadow.model_copy(update={"enabled": False})
        if adapter.state in _WAS_SERVED
        else profile.shadow,
        "deploy": Deploy(when="promoted"),
        "watch": profile.watch,
        "targets": profile.targets,
        "fingerprints": Fingerprints(config=checked.resolved.fingerprint, code=code_fingerprint()),
        "origins": checked.resolved.said(),
        "metadata": with_commit(workspace, {}),
    }
    return with_stored_paths(workspace, made_by.model_copy(update=changes))


def _queue(tx: Tx, adapter: Adapter, spec: RunSpec, actor: str, *, force: bool, reason: str) -> DeployedAgain:
    runs.add(
        tx,
        spec,
        actor=actor,
        priority=Priority.NORMAL.rank,
        body_hash=sha256_text(canonical_json(spec.model_dump(mode="json"))),
        parent_id=adapter.run_id,
    )
    state, kind, payload = RunState.EVALUATING, TaskKind.EVALUATE, None
    why = f"{actor} asks for {adapter.name} to go live{f': {reason}' if reason else ''}; measured first"
    if spec.deploy.when == "never":
        why = f"{actor} asks for {adapter.name} to be measured against what is live; nothing goes live by it"
    if force:
        state, kind = RunState.DEPLOYING, TaskKind.DEPLOY
        payload = Forced(actor, reason, deployments.live_digest(tx, adapter.profile)).payload()
        why = f"forced past the gate by {actor}: {reason}"
        events.record(tx, "adapter", adapter.id, "forced", actor=actor, reason=reason, detail={"run": spec.run_id})
    lifecycle.go_on(tx, runs.get(tx, spec.run_id), state, kind, actor, why, payload)
    return DeployedAgain(spec.run_id, state, why)
