"""Plan: what a run of a profile would be, on this data or on any, without queueing it or keeping anything."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import ConfigError, Refused
from tunesmith.core.files import read_manifest
from tunesmith.core.ids import new_id
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.earlier_splits import kept_splits
from tunesmith.datasets.listings import newest
from tunesmith.datasets.prepare import Progress, options_of
from tunesmith.datasets.report import DatasetReport, Split
from tunesmith.orchestration.check import check
from tunesmith.orchestration.submit import METHOD_OF_KIND
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.profile import HardwareTier, Method
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import queue
from tunesmith.store.database import Database
from tunesmith.training.memory_estimate import PLANNED, Device, Outlook, memory_outlook, num_characters
from tunesmith.training.rules.estimate import Estimate, Pace, estimate_training, num_characters_of, num_tokens_of


@dataclass(frozen=True)
class Schedule:
    """How much there is to train on, and how long that will take."""

    num_examples: int
    num_tokens: int
    """About so many, over all passes."""
    num_steps: int
    estimate: Estimate


@dataclass(frozen=True)
class RunPlan:
    """What a run would be."""

    profile: str
    trainer: str
    method: Method
    tier: HardwareTier
    schedule: Schedule | None
    """None without data, where the profile has no dataset either."""
    newest_dataset_id: str | None
    """Without data: the profile's newest dataset, which the schedule is about."""
    per_thousand: Estimate | None
    """Without any data: for a thousand examples as long as recipe.max_length allows, so at most."""
    memory: Outlook | None
    """None for a trainer that has rules of its own."""


def plan_run(
    database: Database,
    workspace: Workspace,
    profile: str,
    data: str | Sequence[Path] | None,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    environ: Mapping[str, str] | None = None,
    on_progress: Progress | None = None,
) -> RunPlan:
    """Everything that can be known now; raises what a run would be refused for, what cannot fit its device too."""
    checked, trainer, _ = check(database, workspace, profile, overrides=overrides, environ=environ)
    report = None if data is None else _report(database, workspace, checked, data, on_progress)
    method = _method(checked.profile.recipe.method, report)
    recipe, hardware = checked.profile.recipe.model_copy(update={"method": method}), checked.profile.hardware
    memory = None
    if trainer.name == PLANNED:
        device = Device(checked.tier, hardware.memory_gb, hardware.processes)
        memory = memory_outlook(database, checked.base_folder, recipe, method, device, report, checked.context)
        if memory.plan.refusal is not None:
            raise ConfigError(f"profile {profile}: {memory.plan.refusal}")
    newest = _newest_dataset(database, profile) if data is None else None
    about = report if newest is None else _report(database, workspace, checked, newest, None)
    schedule = None if about is None else _schedule(database, checked, about)
    longest = 1000 * num_characters_of(recipe.max_length)
    per_thousand = None if about is not None else _estimate(database, checked, 1000, longest)
    return RunPlan(profile, trainer.name, method, checked.tier, schedule, newest, per_thousand, memory)


def _newest_dataset(database: Database, profile: str) -> str | None:
    with database.read() as tx:
        return next((dataset.id for dataset in newest(tx, profile=profile, limit=1)), None)


def _method(wanted: Method, report: DatasetReport | None) -> Method:
    """What `auto` would be; without data, the plainest."""
    if wanted is not Method.AUTO:
        return wanted
    return Method.SFT if report is None else METHOD_OF_KIND[report.kind]


def _report(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    data: str | Sequence[Path],
    on_progress: Progress | None,
) -> DatasetReport:
    """Of a dataset that is there, or of what the files would make; what they make is thrown away again."""
    if isinstance(data, str):
        with database.read() as tx:
            dataset = datasets.find(tx, data)
        if dataset.profile != checked.profile.name:
            raise Refused(
                f"dataset {dataset.id} belongs to profile {dataset.profile}; give its files, or plan for that profile"
            )
        return DatasetReport.model_validate(read_manifest(workspace.data_dir / dataset.path).meta)
    from tunesmith.datasets.prepare_folder import prepare

    folder = workspace.datasets_dir / new_id("ds")
    try:
        kept = kept_splits(database, workspace, checked)
        return prepare(data, folder, options_of(checked), kept=kept, on_progress=on_progress).report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _schedule(database: Database, checked: CheckedProfile, report: DatasetReport) -> Schedule:
    recipe, num_examples = checked.profile.recipe, report.counts[Split.TRAIN]
    share = num_examples / max(1, sum(report.counts.values()))
    each_pass = num_tokens_of(round(num_characters(report) * share))
    num_steps = max(1, math.ceil(recipe.epochs * each_pass / recipe.batch_tokens))
    num_steps = min(num_steps, recipe.max_steps or num_steps)
    return Schedule(
        num_examples=num_examples,
        num_tokens=min(round(recipe.epochs * each_pass), num_steps * recipe.batch_tokens),
        num_steps=num_steps,
        estimate=_estimate(database, checked, num_examples, num_characters(report)),
    )


def _estimate(database: Database, checked: CheckedProfile, num_examples: int, num_characters: int) -> Estimate:
    with database.read() as tx:
        earlier = queue.paces(tx, checked.profile.name)
    return estimate_training(
        num_examples=num_examples,
        num_characters=num_characters,
        recipe=checked.profile.recipe,
        lock=checked.architecture,
        tier=checked.tier,
        earlier=[Pace(num, train_s) for num, train_s in earlier],
    )
