"""The configuration of one curriculum cycle, checked before the first call: a model must not be its own teacher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.core.errors import ConfigError, Refused, TunesmithError
from tunesmith.core.staging import staging_for
from tunesmith.curriculum.rules.cycle import same_as_student, unready, why_off
from tunesmith.curriculum.teachers.endpoint import key_of
from tunesmith.curriculum.teachers.local import check_folder, same_weights
from tunesmith.experience.capture import CaptureRules
from tunesmith.experience.policy import resolve_rules
from tunesmith.experience.queries import reviews
from tunesmith.profiles.base_model import MODEL_WEIGHTS, base_digest
from tunesmith.profiles.checks import ProfileCheck
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.resolve import resolve_now
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.profiles.sections.curriculum import CurriculumPolicy, TeacherSettings
from tunesmith.profiles.sections.screens import Screen
from tunesmith.profiles.workspace import Workspace
from tunesmith.store.database import Database

_ALWAYS = (Screen.SECRET, Screen.CONTROL_TOKEN, Screen.HIDDEN_TEXT, Screen.INJECTION)
"""What a teacher's answer is searched for, whatever the profile searches its own files for."""
TEACHING = "teaching"
"""Below .tunesmith: folders of cycles with a local teacher, while they last."""


@dataclass(frozen=True)
class CycleConfig:
    """Profile, policy, teacher and folders of one cycle."""

    profile: str
    policy: CurriculumPolicy
    rules: CaptureRules
    key: str | None
    folder: Path | None
    """Of a local teacher."""
    work_dir: Path
    """Where a cycle may keep what it needs, for as long as it lasts."""
    why_off: str | None = None
    """Why none begins by itself; a person may begin one all the same."""

    @property
    def teacher(self) -> TeacherSettings:
        return self.policy.teacher

    @property
    def teacher_name(self) -> str:
        return str(self.teacher.name)

    def __repr__(self) -> str:
        """Never the key: this may end up in a log."""
        return f"CycleConfig({self.profile}, {self.teacher_name})"


def policy_of(
    database: Database, workspace: Workspace, profile: str, environ: Mapping[str, str] | None
) -> tuple[CurriculumPolicy, str | None]:
    """The curriculum of a profile with every layer, and why no cycle begins by itself; None: one may.

    A disabled profile has none that does.
    """
    resolved, campaign = resolve_now(database, workspace, profile, environ=environ)
    policy = resolved.profile.curriculum
    if not resolved.profile.enabled:
        policy = policy.model_copy(update={"enabled": False})
    return policy, _why_off(resolved.profile, policy, campaign)


def _why_off(profile: Profile, policy: CurriculumPolicy, campaign: Campaign | None) -> str | None:
    has_campaign = campaign is not None and campaign.state is CampaignState.ACTIVE
    return why_off(policy, has_campaign=has_campaign, problem=unready(policy, profile.experience.wanted))


def cycle_config(
    database: Database,
    workspace: Workspace,
    profile: str,
    *,
    actor: str,
    environ: Mapping[str, str] | None,
    check: ProfileCheck,
) -> CycleConfig:
    """Everything for a cycle; raises where the teacher cannot be asked, costs nobody knows what, or is the student."""
    found, campaign = resolve_now(database, workspace, profile, environ=environ)
    resolved = found.profile
    rules = resolve_rules(database, workspace, profile, actor=actor, environ=environ, check=check)
    policy = resolved.curriculum
    if not resolved.enabled:
        raise Refused(f"profile {profile} is disabled: {resolved.disabled_reason}; nothing is learnt for it")
    problem = unready(policy, rules.policy.wanted)
    if problem is not None:
        raise ConfigError(f"profile {profile}: {problem}")
    folder = None
    if policy.teacher.kind == "local":
        folder = _local_folder(workspace, resolved)
    else:
        _refuse_student(database, workspace, resolved)
    screens = tuple(screen for screen in Screen if screen in {*rules.screens, *_ALWAYS})
    key = key_of(policy.teacher, os.environ if environ is None else environ)
    off = _why_off(resolved, policy, campaign)
    rules = replace(rules, screens=screens)
    return CycleConfig(profile, policy, rules, key, folder, workspace.data_dir / TEACHING, off)


def remove_left_behind(workspace: Workspace) -> None:
    """Remove what cycles with a local teacher left that were killed together with their program."""
    folder = workspace.data_dir / TEACHING
    if folder.is_dir():
        with staging_for(folder / "sweep"):
            pass  # to make a folder there is to remove those that nobody holds


def _refuse_student(database: Database, workspace: Workspace, profile: Profile) -> None:
    """A student cannot teach itself: by name, by folder, by content."""
    with database.read() as tx:
        known = set(reviews.profiles_known(tx))
    known |= {path.stem for path in workspace.profiles_dir.glob("*.yaml")}
    base = workspace.locate(profile.base.path)
    problem = same_as_student(profile.curriculum.teacher, known, {base.name}) or _same_folder(workspace, profile, base)
    if problem is not None:
        raise Refused(f"profile {profile.name}: {problem}")


def _same_folder(workspace: Workspace, profile: Profile, base: Path) -> str | None:
    """Servers name a model by its folder where nobody gave it another name."""
    model = str(profile.curriculum.teacher.model)
    try:
        folder = workspace.locate(model)
        if not folder.is_dir():
            return None
        is_ours = workspace.data_dir.resolve() in folder.parents
        if is_ours or folder == base or base_digest(folder) == base_digest(base):
            return (
                f"curriculum.teacher.model: {model!r} is the folder of a model that this workspace tunes; "
                "a student cannot teach itself: name another model"
            )
    except (TunesmithError, OSError):
        return None  # not the folder of a model on this machine
    return None


def _local_folder(workspace: Workspace, profile: Profile) -> Path:
    """Where a local teacher is; raises where that is no model, or the student: by folder, by content."""
    said = str(profile.curriculum.teacher.path)
    folder, base = workspace.locate(said), workspace.locate(profile.base.path)
    is_ours = workspace.data_dir.resolve() in (folder, *folder.parents)
    if not is_ours and folder != base:
        check_folder(folder)
        is_ours = any(_is_copy(folder, other) for other in (base, *_tuned_models(workspace)))
    if is_ours or folder == base:
        raise Refused(
            f"profile {profile.name}: curriculum.teacher.path: {said!r} is a model that this workspace tunes; "
            "a student cannot teach itself: name another model"
        )
    return folder


def _tuned_models(workspace: Workspace) -> list[Path]:
    """Folders of whole models that were tuned here: a copy of one may lie anywhere."""
    return [path.parent for path in workspace.adapters_dir.rglob(MODEL_WEIGHTS)]


def _is_copy(folder: Path, other: Path) -> bool:
    try:
        return same_weights(folder, other)
    except OSError:
        return False  # there is no such model to be the same
