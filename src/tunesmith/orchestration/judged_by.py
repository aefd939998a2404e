"""What will judge a run, as its spec keeps it: metrics, settings of verifiers, the program that scores, the gate."""

from __future__ import annotations

from typing import Any

from tunesmith.evaluation.evaluators.command import command_in
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.workspace import Workspace
from tunesmith.verifiers.metric_names import verifiers_among


def judged_by(workspace: Workspace, profile: Profile) -> dict[str, Any]:
    """Fields of a `RunSpec`; the same for a run that trains and for one that deploys a version again."""
    command = command_in(workspace.root, profile.evaluation.command)
    return {
        "evaluation": profile.evaluation,
        "verifiers": {name: profile.experience.wanted[name] for name in verifiers_among(profile.evaluation.metrics)},
        "command_sha256": {} if command is None else command.sha256,
        "gate": profile.gate,
    }
