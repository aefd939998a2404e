"""A profile's dataset: its options, `prepare_folder.prepare`, its row in the store, its cases in the held-out pool.

Until the dataset's row is in the store, a mark file lies beside its folder. A killed process leaves folder and mark. A
worker that can lock the mark removes the folder, unless the row exists. A folder without a mark is never removed: it
may belong to another store, or to one that was restored from a backup.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, get_args

from tunesmith.core.errors import DataError, UsageError, did_you_mean, quoted
from tunesmith.core.files import sha256_text, verify_folder, write_atomic
from tunesmith.core.ids import new_id
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.earlier_splits import kept_splits
from tunesmith.datasets.example import Message
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.queries import HeldoutCase
from tunesmith.datasets.report import DatasetReport, Format, PreparedDataset, PrepareOptions, Split, Windows
from tunesmith.profiles.architecture import read_control_tokens
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.rules.lock import check_lock
from tunesmith.profiles.sections.screens import chosen_screens
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.store.database import Database

Progress = Callable[[int, int, int], None]
_MAX_CASES = 20_000  # of the pool that new data is compared with; more are spread evenly over it


class ReadOptions(TypedDict, total=False):
    """How to read the sources. A missing format is detected; without `where` and `max_examples`, all rows are read."""

    format: str
    windows: str
    where: Sequence[str]
    max_examples: int | None


def prepare_dataset(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    sources: Sequence[Path],
    *,
    actor: str,
    reading: ReadOptions | None = None,
    on_progress: Progress | None = None,
) -> tuple[Dataset, DatasetReport]:
    """Validate, split and publish the files, then record them. The same content again is the same dataset.

    A source may be a pattern such as data/*.jsonl.
    """
    from tunesmith.datasets.prepare_folder import prepare
    from tunesmith.datasets.sources import expanded

    options, files = _as_read(options_of(checked), reading or {}), expanded(sources)
    cases, kept = judging_cases(database, checked), kept_splits(database, workspace, checked)
    return publish_dataset(
        database,
        workspace,
        checked,
        lambda folder: prepare(files, folder, options, cases=cases, kept=kept, on_progress=on_progress),
        actor=actor,
    )


def publish_dataset(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    make: Callable[[Path], PreparedDataset],
    *,
    actor: str,
) -> tuple[Dataset, DatasetReport]:
    """Record what `make` publishes in a folder of its own. The same content again is the same dataset."""
    dataset_id = new_id("ds")
    folder = workspace.datasets_dir / dataset_id
    with unrecorded(database, folder):
        prepared = make(folder)
        known = _record(database, workspace, checked, dataset_id, prepared, actor)
        if known.id != dataset_id:
            _keep_one(workspace.data_dir / known.path, prepared.path)
    return known, prepared.report


def options_of(checked: CheckedProfile) -> PrepareOptions:
    """What the profile and its base say about preparing."""
    data = checked.profile.data
    return PrepareOptions(
        heldout_share=data.heldout_share,
        validation_share=data.validation_share,
        split_number=checked.lock.split_number,
        max_bad_share=data.max_bad_share,
        screens=chosen_screens(data.screens),
        detectors=data.detectors,
        limits=data.limits,
        control_tokens=read_control_tokens(checked.base_folder),
    )


def judging_cases(database: Database, checked: CheckedProfile) -> list[tuple[str, str]]:
    """What the profile's runs are judged on, question and answer: nothing that overlaps it may be trained."""
    with database.read() as tx:
        pool = datasets.pool(tx, checked.profile.name, "", _MAX_CASES)
    return [_asked_and_answered(case.messages) for case in pool]


def _asked_and_answered(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    asked = [str(message["content"]) for message in messages[:-1] if message["role"] not in ("system", "tools")]
    return "\n".join(asked), str(messages[-1]["content"])


def _as_read(options: PrepareOptions, reading: ReadOptions) -> PrepareOptions:
    for what, known in (("format", get_args(Format)), ("windows", get_args(Windows))):
        given = str(reading.get(what, known[0]))
        if given not in known:
            raise UsageError(f"no {what} {quoted(given)}{did_you_mean(given, known)}")
    most = reading.get("max_examples")
    if most is not None and most < 1:
        raise UsageError(f"max_examples is {most}; take at least one example")
    changes: dict[str, Any] = {key: reading[key] for key in ("format", "windows") if key in reading}
    return options.model_copy(update={**changes, "where": tuple(reading.get("where", ())), "first_examples": most})


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
    cases = heldout_cases(prepared.path, profile.data.heldout_cap)
    with database.write(bulk=True) as tx:
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


def heldout_cases(folder: Path, cap: int) -> list[HeldoutCase]:
    """What a dataset brings to the profile's pool."""
    from tunesmith.datasets.reading import iter_examples

    desirable = (example for example in iter_examples(folder, Split.HELDOUT) if example.is_desirable)
    return [
        HeldoutCase(example.group, [_without_weight(message) for message in example.messages])
        for example in islice(desirable, cap)
    ]


def _without_weight(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


_END = ".unrecorded"
_YOUNG_S = 60.0  # a mark is made a moment before it is locked


@contextlib.contextmanager
def unrecorded(database: Database, folder: Path) -> Iterator[None]:
    """Mark a dataset's folder as unrecorded while it is published and recorded; remove the folder if that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = folder.with_name(f".{folder.name}{_END}")
    write_atomic(mark, _store(database))
    with mark.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            mark.unlink(missing_ok=True)


def remove_unrecorded(database: Database, workspace: Workspace) -> list[str]:
    """Remove folders that killed processes published and never recorded. Return the ids of these datasets."""
    removed = []
    for mark in sorted(workspace.datasets_dir.glob(f".*{_END}")):
        with contextlib.suppress(OSError), mark.open() as handle:
            if time.time() - mark.stat().st_mtime < _YOUNG_S or handle.read() != _store(database):
                continue
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner is alive
            dataset_id = mark.name.removesuffix(_END)[1:]
            folder = mark.with_name(dataset_id)
            with database.read() as tx:
                is_known = datasets.is_known_path(tx, folder.relative_to(workspace.data_dir).as_posix())
            if not is_known:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(dataset_id)
            mark.unlink(missing_ok=True)
    return removed


def _store(database: Database) -> str:
    return sha256_text(database.where)
