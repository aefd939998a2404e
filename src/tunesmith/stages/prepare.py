"""Prepare: JSONL files become a dataset of the profile, and its held-out part joins the profile's pool."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tunesmith.config.checks import CheckedProfile
from tunesmith.config.lock import check_lock
from tunesmith.config.workspace import Workspace
from tunesmith.domain.dataset import DatasetReport, PreparedDataset, PrepareOptions, Split
from tunesmith.domain.example import Message
from tunesmith.domain.screen import chosen_screens
from tunesmith.errors import DataError
from tunesmith.files import verify_folder
from tunesmith.ids import new_id
from tunesmith.modeling.architecture import read_control_tokens
from tunesmith.store import datasets, profiles
from tunesmith.store.database import Database
from tunesmith.store.datasets import Dataset, HeldoutCase

Progress = Callable[[int, int, int], None]


def prepare_dataset(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    sources: Sequence[Path],
    *,
    actor: str,
    on_progress: Progress | None = None,
) -> tuple[Dataset, DatasetReport]:
    """Validate, split and publish the files, then record them. The same content again is the same dataset."""
    from tunesmith.data.prepare import prepare

    dataset_id = new_id("ds")
    prepared = prepare(sources, workspace.datasets_dir / dataset_id, options_of(checked), on_progress=on_progress)
    try:
        known = _record(database, workspace, checked, dataset_id, prepared, actor)
    except BaseException:
        shutil.rmtree(prepared.path, ignore_errors=True)  # a dataset that no row knows would never be found again
        raise
    if known.id != dataset_id:
        _keep_one(workspace.data_dir / known.path, prepared.path)
    return known, prepared.report


def options_of(checked: CheckedProfile) -> PrepareOptions:
    """What the profile and its base say about preparing."""
    data = checked.profile.data
    return PrepareOptions(
        heldout_share=data.heldout_share,
        validation_share=data.validation_share,
        max_bad_share=data.max_bad_share,
        screens=chosen_screens(data.screens),
        control_tokens=read_control_tokens(checked.base_folder),
    )


def _keep_one(known: Path, fresh: Path) -> None:
    """The same content was prepared before: keep that folder, unless it was damaged since."""
    try:
        verify_folder(known)
        shutil.rmtree(fresh)
    except (DataError, OSError):
        shutil.rmtree(known, ignore_errors=True)
        fresh.rename(known)


def _record(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    dataset_id: str,
    prepared: PreparedDataset,
    actor: str,
) -> Dataset:
    profile = checked.profile
    cases = _heldout_cases(prepared.path, profile.data.heldout_cap)
    with database.write() as tx:
        # somebody else may have locked the profile since it was checked
        check_lock(profile.name, profiles.lock(tx, profile.name, checked.lock, actor=actor), checked.lock)
        known = datasets.same_content(tx, profile.name, prepared.fingerprint)
        if known is None:
            known = datasets.add(
                tx,
                dataset_id,
                profile.name,
                path=prepared.path.relative_to(workspace.data_dir).as_posix(),
                fingerprint=prepared.fingerprint,
                kind=prepared.report.kind.value,
                counts={split.value: num for split, num in prepared.counts.items()},
                actor=actor,
            )
            datasets.add_cases(tx, profile.name, dataset_id, cases)
    return known


def _heldout_cases(folder: Path, cap: int) -> list[HeldoutCase]:
    from tunesmith.data.dataset import iter_examples

    desirable = (example for example in iter_examples(folder, Split.HELDOUT) if example.is_desirable)
    return [
        HeldoutCase(example.group, [_without_weight(message) for message in example.messages])
        for example in islice(desirable, cap)
    ]


def _without_weight(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}
