"""Outlook: how long a run will train, and how it will use the memory of its device, before a device can be asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.datasets.report import DatasetReport
from tunesmith.profiles.architecture import read_shape
from tunesmith.profiles.profile import HardwareTier, Method, Recipe
from tunesmith.programs.device.memory import usable_ram
from tunesmith.runs.queries import queue
from tunesmith.runs.spec import RunSpec
from tunesmith.store.database import Database
from tunesmith.training.rules.estimate import Estimate, Pace, estimate_training, num_tokens_of
from tunesmith.training.rules.memory_forecast import (
    CONSTANTS,
    GB,
    TIER_GB,
    correction_of,
    forecast_inputs,
    shape_key,
    size_text,
)
from tunesmith.training.rules.memory_plan import MemoryPlan, plan

PLANNED = "native"
"""The trainer that makes a memory plan; others have rules of their own."""


@dataclass(frozen=True)
class Device:
    """What a run is to train on."""

    tier: HardwareTier
    limit_gb: float | None
    """`hardware.memory_gb`."""
    num_processes: int

    @property
    def bytes(self) -> int:
        """For each process: the tier's memory, or the profile's limit."""
        if self.tier is HardwareTier.CPU:
            there = usable_ram() // self.num_processes
        else:
            there = int(TIER_GB[self.tier] * GB)
        if self.limit_gb is None:
            return there
        limit = int(self.limit_gb * GB)
        return min(there, limit) if self.tier is HardwareTier.CPU else limit

    @property
    def basis(self) -> str:
        if self.limit_gb is not None:
            return "hardware.memory_gb"
        return "this machine's memory" if self.tier is HardwareTier.CPU else f"tier {self.tier}"


@dataclass(frozen=True)
class Outlook:
    """A memory plan made without the device, and what it rests on."""

    plan: MemoryPlan
    usable_bytes: int
    device_basis: str
    num_earlier: int
    """Runs of the same shape that the correction comes from."""

    def in_one_line(self) -> str:
        made = self.plan
        if made.refusal is not None:
            return f"will not fit ({self.device_basis}): {made.refusal}"
        again = f", {made.checkpointed_layers} of {made.num_layers} layers activation-checkpointed"
        return (
            f"about {size_text(made.forecast.total)} of {size_text(made.limit_bytes)} ({self.device_basis}), passes of "
            f"up to {made.pack_tokens} tokens{again if made.checkpointed_layers else ''}"
        )


def corrections(database: Database) -> dict[str, float]:
    """By shape key, what earlier runs took as a multiple of their forecast."""
    with database.read() as tx:
        return {key: correction_of(ratios) for key, ratios in queue.memory_ratios(tx).items()}


def training_estimate(database: Database, spec: RunSpec, report: DatasetReport) -> Estimate:
    """How long a run will train, by earlier ones of its profile where there are some."""
    with database.read() as tx:
        earlier = queue.paces(tx, spec.profile)
    return estimate_training(
        num_examples=spec.dataset.num_train,
        num_characters=num_characters(report),
        recipe=spec.recipe,
        lock=spec.base.lock,
        tier=HardwareTier(spec.hardware_tier),
        earlier=[Pace(num_examples, train_s) for num_examples, train_s in earlier],
    )


def memory_of_spec(database: Database, spec: RunSpec, report: DatasetReport) -> Outlook:
    device = Device(HardwareTier(spec.hardware_tier), spec.memory_gb, spec.num_processes)
    return memory_outlook(database, Path(spec.base.path), spec.recipe, spec.method, device, report, spec.base.context)


def memory_outlook(
    database: Database | None,
    base: Path,
    recipe: Recipe,
    method: Method,
    device: Device,
    report: DatasetReport | None,
    context: int,
) -> Outlook:
    """The plan as the run would make it on that device; without data, for examples as long as the recipe allows.

    `database`: None where there is no store yet, so no earlier run corrects the forecast.
    """
    shape = read_shape(base)
    inputs = forecast_inputs(shape, recipe, method, "cpu" if device.tier is HardwareTier.CPU else "cuda")
    ratios: Sequence[float] = []
    if database is not None:
        with database.read() as tx:
            ratios = queue.memory_ratios(tx).get(shape_key(shape, recipe, method, inputs), [])
    longest, step = _sizes(recipe, method, report, context)
    made = plan(
        shape,
        recipe,
        method,
        device.bytes,
        longest,
        largest_step=max(longest, math.ceil(step / device.num_processes)),
        inputs=replace(inputs, correction=correction_of(ratios)),
    )
    usable = int(made.limit_bytes * (1.0 - CONSTANTS.headroom))
    return Outlook(made, usable, device.basis, len(ratios))


def num_characters(report: DatasetReport) -> int:
    """Of all examples together, from the middle of each range of lengths."""
    return sum(bucket.below * bucket.num for bucket in report.lengths) * 3 // 4


def _sizes(recipe: Recipe, method: Method, report: DatasetReport | None, context: int) -> tuple[int, int]:
    """Tokens of the longest item and of the largest step, as far as lengths in characters can tell."""
    answers = 2 if method in (Method.DPO, Method.ORPO) else 1
    longest = min(recipe.max_length, context) * answers
    if report is None:
        return longest, recipe.batch_tokens + longest // 2
    longest_text = max((bucket.below for bucket in report.lengths if bucket.num), default=0)
    longest = max(1, min(longest, num_tokens_of(longest_text)))
    # steps are cut where an example begins, so some have half an example more than others
    return longest, max(longest, min(num_tokens_of(num_characters(report)), recipe.batch_tokens + longest // 2))
