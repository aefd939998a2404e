"""The dry run: everything that a run would be refused or fail for before its first step, known at once.

Nothing is queued, recorded or reserved, and no worker is needed. What files or experiences would become is prepared in
a folder that is gone afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ConfigError, DataError, TunesmithError
from tunesmith.core.ids import new_id
from tunesmith.datasets.earlier_splits import kept_splits
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.prepare import Progress, judging_cases, options_of
from tunesmith.datasets.report import DatasetReport
from tunesmith.experience.assemble import rehearsed
from tunesmith.experience.held_out import shortage_of_dataset
from tunesmith.experience.rules.held_out import Shortage
from tunesmith.orchestration.check import check
from tunesmith.orchestration.submit import Submission, existing_dataset, queue_once, report_of, spec_of
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.spec import RunSpec, base_of
from tunesmith.store.database import Database
from tunesmith.training.memory_estimate import PLANNED, memory_of_spec, training_estimate
from tunesmith.training.rules.estimate import Estimate


@dataclass(frozen=True)
class DryRun:
    """What a run would be; whatever stands against it was raised."""

    profile: str
    trainer: str
    method: str
    dataset_id: str | None
    """None: the dataset would be made from files or experiences."""
    counts: dict[str, int]
    """Examples by split."""
    estimate: Estimate
    memory: str | None
    warnings: tuple[str, ...]


class _Rehearsed(Exception):
    pass


def dry_run(
    database: Database,
    workspace: Workspace,
    submission: Submission,
    *,
    actor: str,
    environ: Mapping[str, str] | None = None,
    on_progress: Progress | None = None,
) -> DryRun:
    """Look at everything; raises the first thing that a run would be refused or fail for."""
    checked, trainer, _ = check(
        database, workspace, submission.profile, overrides=submission.overrides, environ=environ
    )
    with _data(database, workspace, checked, submission, on_progress) as (dataset, report, short):
        spec = spec_of(database, workspace, submission, checked, trainer, dataset, base_of(checked))
        memory = memory_of_spec(database, spec, report) if trainer.name == PLANNED else None
        if memory is not None and memory.plan.refusal is not None:
            raise ConfigError(f"profile {submission.profile}: {memory.plan.refusal}")
        is_known = isinstance(submission.data, str)
        if is_known:
            _rehearse(database, spec, submission, report, actor)
        warnings = _looked_at(spec)
    few = None if short is None else short.told(is_decided=checked.lock.is_split_decided)
    return DryRun(
        profile=submission.profile,
        trainer=trainer.name,
        method=spec.method.value,
        dataset_id=dataset.id if is_known else None,
        counts={split.value: count for split, count in report.counts.items()},
        estimate=training_estimate(database, spec, report),
        memory=None if memory is None else memory.in_one_line(),
        warnings=tuple(filter(None, (few, *report.warnings, *warnings))),
    )


@contextmanager
def _data(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    submission: Submission,
    on_progress: Progress | None,
) -> Iterator[tuple[Dataset, DatasetReport, Shortage | None]]:
    """The dataset that the run would train on, and what it lacks to be judged; one that is made is gone afterwards."""
    from tunesmith.core.staging import staging_for
    from tunesmith.datasets.prepare_folder import prepare
    from tunesmith.datasets.sources import expanded

    def short_of(dataset: Dataset) -> Shortage | None:
        return shortage_of_dataset(database, checked, dataset.id, workspace.data_dir / dataset.path)

    if isinstance(submission.data, str):
        dataset = existing_dataset(database, workspace, checked.profile.name, submission.data)
        yield dataset, report_of(workspace, dataset), short_of(dataset)
    elif submission.data is None:
        with rehearsed(database, workspace, checked) as (folder, report, short):
            yield _unrecorded(workspace, checked, folder, report), report, short
    else:
        cases, kept = judging_cases(database, checked), kept_splits(database, workspace, checked)
        with staging_for(workspace.datasets_dir / new_id("ds")) as staged:
            made = prepare(
                expanded(submission.data),
                staged / "prepared" / "dataset",  # a level deeper: the lock on `staged` is ours
                options_of(checked),
                cases=cases,
                kept=kept,
                on_progress=on_progress,
            )
            unrecorded = _unrecorded(workspace, checked, made.path, made.report)
            yield unrecorded, made.report, short_of(unrecorded)


def _unrecorded(workspace: Workspace, checked: CheckedProfile, folder: Path, report: DatasetReport) -> Dataset:
    return Dataset(
        id="(dry run)",
        profile=checked.profile.name,
        path=folder.relative_to(workspace.data_dir).as_posix(),
        fingerprint=report.fingerprint,
        kind=report.kind.value,
        counts={split.value: num for split, num in report.counts.items()},
        created_at=datetime.now(UTC),
        reserved_until=None,
    )


def _rehearse(database: Database, spec: RunSpec, submission: Submission, report: DatasetReport, actor: str) -> None:
    """Queue the run as submitting would, and undo it: what the store refuses is refused here in the same words."""
    without_key = replace(submission, idempotency_key=None)
    with suppress(_Rehearsed), database.write() as tx:
        queue_once(tx, spec, without_key, "", report.options, actor)
        raise _Rehearsed


def _looked_at(spec: RunSpec) -> tuple[str, ...]:
    """What the trainer would warn about; raises what it would fail with. A child counts the tokens."""
    looked = spec.model_copy(update={"dry_run": True, "expected_artifact": "none"})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tunesmith.training.trainers.dry_run"],
        input=looked.model_dump_json().encode(),
        capture_output=True,
        env=child_environment(os.environ),
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise TunesmithError(f"the dry run ended with exit code {done.returncode}: {last[0]}") from None
    if answer["problem"] is not None:
        raise DataError(str(answer["problem"]))
    return tuple(answer["warnings"])
