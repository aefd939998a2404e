"""Start: look at a base model and this machine, and decide what the first profile of a task says. Writes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from zoneinfo import available_timezones

from tunesmith.core.errors import ConfigError, UsageError, did_you_mean, quoted
from tunesmith.core.ids import is_name
from tunesmith.profiles.first_profile import FirstProfile
from tunesmith.profiles.profile import FAMILIES, HardwareTier, Method, Recipe, Role
from tunesmith.profiles.rules.first_profile import (
    choose_shares,
    longest_answer,
    longest_example,
    role_for,
    tier_of,
)
from tunesmith.profiles.sections.campaign import CampaignPolicy
from tunesmith.profiles.sections.experience import Mix
from tunesmith.profiles.whole_base import BaseFacts, read_whole_base
from tunesmith.programs.device.gpu import Gpu, find_gpu
from tunesmith.programs.device.memory import usable_ram
from tunesmith.training.memory_estimate import Device, Outlook, memory_outlook
from tunesmith.training.rules.memory_forecast import TIER_GB
from tunesmith.triggers.new_data import NewDataSettings

_UTC = ("Etc/UTC", "Etc/UCT", "UCT", "Zulu", "Etc/Zulu", "Universal", "Etc/Universal")
_SHORTEST = 256
"""Tokens: where not even examples of this length fit, the machine is too small for the base."""


@dataclass(frozen=True)
class StartWish:
    """What a person says who starts on a base of their own."""

    task: str
    base: Path
    """The folder of the base; absolute."""
    revision: str | None = None
    role: Role | None = None
    tier: HardwareTier | None = None
    """Where it will train; None: on this machine."""


def check_task(task: str) -> None:
    if not is_name(task):
        raise UsageError(
            f"--task {quoted(task)} cannot name a model: use lower-case letters, digits, '.', '_' and '-', "
            "at most 63, the first a letter or digit; for example support"
        )


def first_profile(wish: StartWish, root: Path) -> FirstProfile:
    """The profile for a workspace at `root`; ConfigError where the base or the machine cannot do it."""
    check_task(wish.task)
    facts = read_whole_base(wish.base)
    gpu = find_gpu() if wish.tier is None else None
    tier = wish.tier or tier_of(None if gpu is None else gpu.gb)
    memory_gb = None if gpu is None or gpu.gb >= TIER_GB[tier] else float(int(gpu.gb))
    max_length, outlook = _fitting(wish, facts, tier, memory_gb)
    num_new, min_new = NewDataSettings().count, Mix().min_new
    shares = choose_shares(num_new, min_new)
    assert shares is not None, "the defaults of triggers and mix leave room for a first round"
    return FirstProfile(
        task=wish.task,
        role=_role(wish, facts.lock.family),
        base_path=_path_text(wish.base, root),
        revision=wish.revision,
        architecture=facts.lock,
        num_parameters=facts.shape.num_parameters,
        tier=tier,
        device=_device(wish.tier, gpu),
        memory_gb=memory_gb,
        memory=outlook.in_one_line(),
        max_length=max_length,
        max_tokens=longest_answer(facts.lock.context),
        shares=shares,
        num_new=num_new,
        min_new=min_new,
        window=CampaignPolicy().window,
        time_zone=local_zone(),
        target="embedded" if find_spec("torch") is not None else "directory",
    )


def _fitting(wish: StartWish, facts: BaseFacts, tier: HardwareTier, memory_gb: float | None) -> tuple[int, Outlook]:
    """The longest examples that fit the device, also as pairs where that is possible; ConfigError if none do."""
    device, context, first = Device(tier, memory_gb, 1), facts.lock.context, longest_example(facts.lock.context)
    lengths = [first, *(n for n in (1024, 512, _SHORTEST) if n < first)]

    def plan(length: int, method: Method) -> Outlook:
        recipe = Recipe(max_length=length, method=method)
        return memory_outlook(None, wish.base, recipe, method, device, None, context)

    fitting = [(n, seen) for n in lengths if (seen := plan(n, Method.SFT)).plan.refusal is None]
    if not fitting:
        refusal = plan(lengths[-1], Method.SFT).plan.refusal
        raise ConfigError(
            f"base model {wish.base}: does not fit {tier} to be trained: {refusal}; take a smaller base, or name "
            "the machine that will train it, for example --tier datacenter-gpu"
        )
    return next(((n, seen) for n, seen in fitting if plan(n, Method.ORPO).plan.refusal is None), fitting[-1])


def _role(wish: StartWish, family: str) -> Role:
    role = wish.role or role_for(family)
    if role is None or family not in FAMILIES[role]:
        known = sorted(FAMILIES[role] if role is not None else frozenset().union(*FAMILIES.values()))
        raise ConfigError(
            f"base model {wish.base}: its family {quoted(family)} is not supported"
            f"{'' if role is None else f' for role {role}'}; supported: {', '.join(known)}"
        )
    return role


def _path_text(base: Path, root: Path) -> str:
    """Relative if the base lies in the workspace, so that both can be moved together; else absolute."""
    try:
        return base.relative_to(root).as_posix()
    except ValueError:
        return str(base)


def _device(wanted: HardwareTier | None, gpu: Gpu | None) -> str:
    if wanted is not None:
        return "as --tier said"
    ram = f"{usable_ram() / 2**30:.1f} GB of memory"
    return f"seen here: {f'no GPU, {ram}' if gpu is None else f'{gpu.name}, {gpu.gb:.1f} GB'}"


def local_zone(localtime: Path = Path("/etc/localtime")) -> str:
    """The time zone of this machine by its name; UTC where it has none."""
    linked = os.path.realpath(localtime).partition("/zoneinfo/")[2]
    for name in (os.environ.get("TZ", "").removeprefix(":"), linked):
        if name and name in available_timezones():
            return "UTC" if name in _UTC else name
    return "UTC"


T = TypeVar("T", bound=StrEnum)


def named(kind: type[T], text: str | None, option: str) -> T | None:
    """The tier or role that a text names; UsageError with the nearest one."""
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{option}: no {quoted(text)}{did_you_mean(text, list(kind))}") from None
