"""`client.datasets`: prepare files into datasets, list, show, verify, compare, export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tunesmith.client.session import Session
from tunesmith.client.views import ExportedFile
from tunesmith.domain.dataset import DatasetReport, Split
from tunesmith.errors import DataError, UsageError, nearest, show
from tunesmith.files import read_manifest
from tunesmith.stages.prepare import Progress, Reading, prepare_dataset
from tunesmith.stages.submit import check
from tunesmith.store import datasets
from tunesmith.store.datasets import Dataset

if TYPE_CHECKING:
    from tunesmith.data.diff import DatasetDiff

_FORMS = ("jsonl", "parquet")


class Datasets:
    def __init__(self, session: Session) -> None:
        self._session = session

    def prepare(
        self,
        profile: str,
        files: Sequence[str | Path],
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        on_progress: Progress | None = None,
        **reading: Unpack[Reading],
    ) -> tuple[Dataset, DatasetReport]:
        """Validate, split and publish files, or all that match a pattern, as one dataset of the profile.

        `format`: one of docs/data.md, found out unless told. `windows`: whole, last or all. `where`: conditions like
        "lang=en". `max_examples`: stop after so many.
        """
        session = self._session
        checked, _, _ = check(
            session.database, session.workspace, profile, overrides=overrides, environ=session.environ
        )
        return prepare_dataset(
            session.database,
            session.workspace,
            checked,
            [Path(file) for file in files],
            actor=session.actor,
            reading=reading,
            on_progress=on_progress,
        )

    def list(self, profile: str | None = None) -> list[Dataset]:
        profile = self._session.known_profile(profile)
        with self._session.database.read() as tx:
            return datasets.listing(tx, profile)

    def show(self, dataset_id: str) -> tuple[Dataset, DatasetReport]:
        dataset = self._find(dataset_id)
        meta = read_manifest(self._session.workspace.data_dir / dataset.path).meta
        return dataset, DatasetReport.model_validate(meta)

    def verify(self, dataset_id: str) -> Dataset:
        """Recompute the fingerprint from the bytes on disk; raises if the dataset is not what it says."""
        from tunesmith.data.dataset import verify

        dataset = self._find(dataset_id)
        try:
            verify(self._session.workspace.data_dir / dataset.path, dataset.fingerprint)
        except OSError as error:
            raise DataError(f"dataset {dataset.id} cannot be read: {error}") from error
        return dataset

    def diff(self, before: str, after: str) -> DatasetDiff:
        """What the second dataset has, and has not, that the first one has not, and has."""
        from tunesmith.data.diff import diff

        return diff(*(self._session.workspace.data_dir / self._find(name).path for name in (before, after)))

    def export(
        self,
        dataset_id: str,
        target: str | Path,
        *,
        form: str | None = None,
        split: str | None = None,
        force: bool = False,
    ) -> ExportedFile:
        """Write a dataset, or one split, as JSONL in OpenAI's form or as Parquet; the name tells unless `form` does."""
        from tunesmith.data.export import export

        dataset, path = self._find(dataset_id), Path(target)
        chosen = form or ("parquet" if path.suffix == ".parquet" else "jsonl")
        for given, known in ((chosen, _FORMS), (split, tuple(Split))):
            if given is not None and given not in known:
                what = "form" if known is _FORMS else "split"
                raise UsageError(f"no {what} {show(given)}{nearest(given, map(str, known))}")
        splits = tuple(Split) if split is None else (Split(split),)
        folder = self._session.workspace.data_dir / dataset.path
        num_examples = export(folder, path, chosen, splits, replace=force)
        return ExportedFile(dataset.id, path, chosen, num_examples, path.stat().st_size)

    def _find(self, dataset_id: str) -> Dataset:
        with self._session.database.read() as tx:
            return datasets.find(tx, dataset_id)
