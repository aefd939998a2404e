"""Check: resolve a profile with its campaign, and all that can be known before a run is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.core.errors import ConfigError
from tunesmith.datasets.screens.detectors import check_installed
from tunesmith.deployment.target_conflicts import place_problems
from tunesmith.deployment.targets.registry import make_target, target_kinds
from tunesmith.evaluation.evaluators.command import command_in
from tunesmith.evaluation.evaluators.registry import find_metric
from tunesmith.orchestration.retry import said_at_submit
from tunesmith.profiles.checks import CheckedProfile, check_profile
from tunesmith.profiles.resolve import resolve_now
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.spec import RunSpec
from tunesmith.store.database import Database
from tunesmith.training.trainers.base import TrainerInfo
from tunesmith.training.trainers.command import sealed
from tunesmith.training.trainers.registry import find_trainer

DRY_RUN = "dry-run"


def check_now(
    database: Database, workspace: Workspace, profile: str, *, environ: Mapping[str, str] | None = None
) -> CheckedProfile:
    """A profile as it stands, without overrides; raises where it could not be run."""
    checked, _, _ = check(database, workspace, profile, environ=environ)
    return checked


def check(
    database: Database,
    workspace: Workspace,
    profile: str,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    dry_run: bool = False,
    new_split: bool = False,
    environ: Mapping[str, str] | None = None,
    repeats: RunSpec | None = None,
) -> tuple[CheckedProfile, TrainerInfo, str | None]:
    """Resolve a profile with its campaign and check all that can be known before queueing; the campaign's id too.

    `new_split`: other shares than the locked ones are no problem.
    """
    with database.read() as tx:
        locked = profiles.lock_of(tx, profile)
    if locked is not None and new_split:
        locked = locked.model_copy(update={"is_split_decided": False})
    kept = None if repeats is None else said_at_submit(repeats)
    resolved, campaign = resolve_now(database, workspace, profile, overrides=overrides, environ=environ, kept=kept)
    trainer = find_trainer(DRY_RUN if dry_run else resolved.profile.trainer.kind)
    checked = check_profile(
        resolved,
        workspace,
        locked=locked,
        trainer=trainer,
        target_kinds=target_kinds(),
        check_detector=check_installed,
        check_metric=partial(find_metric, settings=resolved.profile.evaluation),
    )
    if checked.profile.trainer.options and not trainer.takes_options and not dry_run:
        named = ", ".join(sorted(checked.profile.trainer.options))
        raise ConfigError(f"profile {profile}: trainer.options: trainer {trainer.name} takes none, found {named}")
    sealed(trainer, checked.profile.trainer.options, workspace.root)
    command_in(workspace.root, checked.profile.evaluation.command)
    for target in checked.profile.targets:
        make_target(target.kind, target.options, root=workspace.root, profile=profile)
    shared = place_problems(database, workspace, profile, checked.profile.targets, environ)
    if shared:
        raise ConfigError("\n".join(f"profile {profile}: {line}" for line in shared))
    return checked, trainer, None if campaign is None else campaign.id
