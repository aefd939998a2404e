"""Everything that can be known to be wrong with a profile before anything is queued, found in one go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tunesmith.core.errors import ConfigError, LockedError, TunesmithError, did_you_mean, quoted
from tunesmith.profiles.architecture import adaptable_modules, read_architecture, read_tensor_shapes
from tunesmith.profiles.base_model import known_digest
from tunesmith.profiles.profile import HardwareTier, Method, Profile
from tunesmith.profiles.resolve import Resolved
from tunesmith.profiles.rules.lock import ArchitectureLock, ProfileLock, lock_differences, lock_of
from tunesmith.profiles.rules.target_limits import limit_violations
from tunesmith.profiles.workspace import Workspace

if TYPE_CHECKING:  # SQLAlchemy takes half a second
    from tunesmith.store.database import Database

T = TypeVar("T")


_REWARD_ACCURACY = "validation_reward_accuracy"
_BETTER = {"validation_loss": "lower", _REWARD_ACCURACY: "higher"}


class TrainerFacts(Protocol):
    """What a trainer declares, as far as a profile depends on it."""

    @property
    def name(self) -> str: ...
    @property
    def tiers(self) -> frozenset[HardwareTier]: ...
    @property
    def default_tier(self) -> HardwareTier: ...
    @property
    def methods(self) -> frozenset[Method]: ...
    @property
    def tunings(self) -> frozenset[str]: ...
    @property
    def quantizations(self) -> frozenset[str]: ...
    @property
    def measures(self) -> frozenset[str]: ...
    @property
    def max_processes(self) -> int: ...


@dataclass(frozen=True)
class CheckedProfile:
    """A profile that can be queued, with what was read and decided while checking it."""

    resolved: Resolved
    base_folder: Path
    lock: ProfileLock
    context: int
    """Longest sequence to use: the model's own, or base.context if that is smaller."""
    tier: HardwareTier

    @property
    def profile(self) -> Profile:
        return self.resolved.profile

    @property
    def architecture(self) -> ArchitectureLock:
        return self.lock.architecture

    @property
    def base_digest(self) -> str:
        assert self.lock.base_digest is not None, "what is locked now has one"
        return self.lock.base_digest


class _Findings:
    """Problems so far, and whether each is a difference from the lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.num_locked = 0

    def add(self, line: str) -> None:
        self.lines.append(f"profile {self.name}: {line}")

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; its refusal is one more finding."""
        try:
            return read()
        except TunesmithError as error:
            self.add(error.message)
            return None

    def raise_any(self) -> None:
        if self.lines:
            only_lock = self.num_locked == len(self.lines)
            raise (LockedError if only_lock else ConfigError)("\n".join(self.lines))


class ProfileCheck(Protocol):
    """The whole check of a profile, trainers and targets included; given by a package that knows those."""

    def __call__(
        self, database: Database, workspace: Workspace, profile: str, *, environ: Mapping[str, str] | None
    ) -> CheckedProfile: ...


def check_profile(
    resolved: Resolved,
    workspace: Workspace,
    *,
    locked: ProfileLock | None,
    trainer: TrainerFacts,
    target_kinds: Collection[str],
    check_detector: Callable[[str], None],
    check_metric: Callable[[str], object],
) -> CheckedProfile:
    """Refuse what cannot work: one error, one line per problem.

    `locked` is None before the first lock; `check_detector` raises where no detector of that name is installed,
    `check_metric` where no evaluator measures a metric.
    """
    profile = resolved.profile
    found = _Findings(profile.name)
    if not profile.enabled:
        found.add(f"is disabled: {profile.disabled_reason}; set `enabled: true` to use it")
    _check_trainer(profile, trainer, found)
    for target in profile.targets:
        if target.kind not in target_kinds:
            found.add(f"targets: no kind of target {quoted(target.kind)}{did_you_mean(target.kind, target_kinds)}")
    for name in profile.data.detectors:
        found.attempt(partial(check_detector, name))
    for name in profile.evaluation.metrics:
        found.attempt(partial(check_metric, name))
    for violation in limit_violations(profile.recipe, profile.targets):
        found.add(violation)
    folder = found.attempt(lambda: workspace.locate(profile.base.path))
    architecture = found.attempt(lambda: read_architecture(folder)) if folder is not None else None
    digest = None
    if folder is not None and architecture is not None:
        digest = found.attempt(lambda: known_digest(folder, workspace.cache_dir))
    if folder is None or architecture is None or digest is None:
        found.raise_any()
        raise AssertionError("an unreadable base is a finding")
    context = _check_base(profile, architecture, found)
    _check_target_modules(profile, folder, found)
    lock = lock_of(profile, architecture, digest)
    if locked is not None:
        known = {"split_number": locked.split_number, "is_split_decided": locked.is_split_decided}
        lock = lock.model_copy(update=known)
        for difference in lock_differences(profile.name, locked, lock):
            found.num_locked += 1
            found.add(difference)
    found.raise_any()
    return CheckedProfile(resolved, folder, lock, context, profile.hardware.tier or trainer.default_tier)


def _check_trainer(profile: Profile, trainer: TrainerFacts, found: _Findings) -> None:
    tier = profile.hardware.tier
    if tier is not None and tier not in trainer.tiers:
        accepted = ", ".join(member for member in HardwareTier if member in trainer.tiers)
        found.add(f"hardware.tier: trainer {trainer.name} does not accept {tier}; it accepts: {accepted}")
    if profile.recipe.tuning not in trainer.tunings:
        found.add(f"recipe.tuning: trainer {trainer.name} cannot do {profile.recipe.tuning}; use native")
    if profile.recipe.quantize not in trainer.quantizations:
        found.add(
            f"recipe.quantize: trainer {trainer.name} cannot train on a base in {profile.recipe.quantize}; "
            "use native, or set recipe.quantize: none"
        )
    if profile.hardware.processes > trainer.max_processes:
        found.add(
            f"hardware.processes: trainer {trainer.name} trains with at most {trainer.max_processes}, "
            f"not {profile.hardware.processes}"
        )
    _check_best(profile, trainer, found)
    method = profile.recipe.method
    candidates = {Method.SFT, Method.ORPO, Method.KTO} if method is Method.AUTO else {method}
    if not candidates & trainer.methods:
        accepted = ", ".join(member for member in Method if member in trainer.methods)
        found.add(f"recipe.method: trainer {trainer.name} cannot do {method}; it can do: {accepted}")


def _check_best(profile: Profile, trainer: TrainerFacts, found: _Findings) -> None:
    """The metric that decides the best checkpoint is measured, and better means what it can only mean."""
    policy, measures = profile.validation, trainer.measures
    if profile.recipe.method is Method.SFT:
        measures -= {_REWARD_ACCURACY}
    if measures and policy.best_metric not in measures:
        close = did_you_mean(policy.best_metric, measures)
        found.add(
            f"validation.best_metric: trainer {trainer.name} does not measure {quoted(policy.best_metric)} "
            f"for recipe.method {profile.recipe.method}{close}"
        )
    better = _BETTER.get(policy.best_metric, policy.best_direction)
    if better != policy.best_direction:
        found.add(
            f"validation.best_direction: {policy.best_direction} would keep the worst checkpoint by "
            f"{policy.best_metric}; set {better}"
        )


def _check_base(profile: Profile, architecture: ArchitectureLock, found: _Findings) -> int:
    """The model is what the profile says it is; returns the context to use."""
    family, own = architecture.family, architecture.context
    # The schema has refused families that the role does not allow; here the model must be of the family it says.
    if profile.base.family != family:
        found.add(f"base.family: the profile says {profile.base.family}, the model's config.json says {family}")
    wanted = profile.base.context
    if wanted is not None and wanted > own:
        found.add(f"base.context: {wanted} is more than the model's own {own}; lower it")
    context = min(own, wanted or own)
    if profile.recipe.max_length > context:
        found.add(f"recipe.max_length: {profile.recipe.max_length} is more than the context of {context}; lower it")
    return context


def _check_target_modules(profile: Profile, folder: Path, found: _Findings) -> None:
    """Each named module must exist; a misspelt one would silently train less."""
    shapes = found.attempt(lambda: read_tensor_shapes(folder))
    wanted = profile.recipe.target_modules
    if shapes is None or wanted == "all-linear":
        return
    modules = adaptable_modules(shapes)
    endings = {module.rpartition(".")[2] for module in modules}
    for name in wanted:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            found.add(
                f"recipe.target_modules: {quoted(name)} matches no module of the base{did_you_mean(name, endings)}"
            )
