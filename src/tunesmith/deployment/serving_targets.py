"""Serving targets of a profile: its configured ones, and `tunesmith serve` of this machine if none of these answers.

The targets of a deployment are stored with it. A running server is not: it is checked and reconciled while it lives,
under a name that no target of a profile can have.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.deployment.rules.parity import Tolerance, tolerance_of
from tunesmith.deployment.targets.base import ServedAdapter, Target
from tunesmith.deployment.targets.registry import make_target
from tunesmith.models.queries import Adapter
from tunesmith.profiles.profile import TargetSettings as TargetConfig
from tunesmith.profiles.workspace import Workspace, is_this_one
from tunesmith.programs.device.queries import servers
from tunesmith.programs.device.rules import ServerState
from tunesmith.programs.process_identity import ProcessIdentity, is_alive
from tunesmith.store.database import Tx

SERVER = "tunesmith serve"
ANSWERING_KINDS = frozenset({"embedded", "vllm", "llamacpp", "ollama"})
"""Kinds of target to which requests are passed on; a profile with none of them is answered by the embedded engine."""
_EMBEDDED = "embedded"


@dataclass(frozen=True)
class ServingTarget:
    """One target that must serve the live version."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    parity_tolerance: float | None = None
    is_busy: bool = False
    """A server that has yielded its device to a training run."""

    def target(self, workspace: Workspace, profile: str) -> Target:
        return make_target(self.kind, self.options, root=workspace.root, profile=profile)

    def tolerance(self, dtype: str) -> Tolerance:
        return tolerance_of(self.kind, self.options, dtype, self.parity_tolerance)


def serving_targets(
    tx: Tx, targets: Sequence[TargetConfig | Mapping[str, Any]], workspace: Workspace
) -> list[ServingTarget]:
    """Return all targets that must serve the live version, in the order in which they are reconciled."""
    parsed = [TargetConfig.model_validate(target) for target in targets]
    found = [ServingTarget(each.name, each.kind, each.options, each.parity_tolerance) for each in parsed]
    server = _server_here(tx, workspace)
    if server is None:
        return found
    is_busy = server.state is not ServerState.SERVING
    if not ANSWERING_KINDS & {each.kind for each in found}:
        return [*found, ServingTarget(SERVER, _EMBEDDED, is_busy=is_busy)]
    return [
        ServingTarget(each.name, each.kind, each.options, each.parity_tolerance, is_busy and each.kind == _EMBEDDED)
        for each in found
    ]


def _server_here(tx: Tx, workspace: Workspace) -> servers.Server | None:
    """A server of this workspace whose process runs on this machine, the one that began last."""
    for server in reversed(servers.alive(tx)):
        process = ProcessIdentity.from_json(server.process)
        is_ours = not process.place or is_this_one(process.place, workspace.root)
        if is_ours and server.host == socket.gethostname() and is_alive(process):
            return server
    return None


def served_adapter(workspace: Workspace, adapter: Adapter) -> ServedAdapter:
    return ServedAdapter(name=adapter.name, path=workspace.data_dir / adapter.path, digest=adapter.digest)
