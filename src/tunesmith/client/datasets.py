"""`client.datasets`: prepare files into datasets, list, show, verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.client.session import Session
from tunesmith.domain.dataset import DatasetReport
from tunesmith.errors import DataError
from tunesmith.files import read_manifest
from tunesmith.stages.prepare import Progress, prepare_dataset
from tunesmith.stages.submit import check
from tunesmith.store import datasets
from tunesmith.store.datasets import Dataset


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
    ) -> tuple[Dataset, DatasetReport]:
        """Validate, split and publish JSONL files as one dataset of the profile."""
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

    def _find(self, dataset_id: str) -> Dataset:
        with self._session.database.read() as tx:
            return datasets.find(tx, dataset_id)
