"""The part of `client.datasets` about rows that are kept aside, and about what was taken out afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.errors import UsageError
from tunesmith.core.files import read_manifest
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.quarantine import review as kept_aside
from tunesmith.datasets.quarantine.review import KeptRow, Released
from tunesmith.datasets.queries import Dataset
from tunesmith.datasets.report import DatasetReport
from tunesmith.evaluation.outliers import OnProgress, OutlierReport, Wish, find_outliers
from tunesmith.evaluation.rules.outliers import THRESHOLD
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.forgetting.queries.erasures import Erasure
from tunesmith.experience.review import check_reason
from tunesmith.orchestration.check import check
from tunesmith.runs.session import Session


class KeptRows:
    def __init__(self, session: Session) -> None:
        self._session = session

    def quarantine(self, dataset_id: str, *, limit: int = 20) -> list[KeptRow]:
        """The first rows that were kept aside, with why; every text in them is safe to show."""
        if limit < 1:
            raise UsageError(f"limit is {limit}; show at least one row")
        return kept_aside.rows(self._session.workspace.data_dir / self._find(dataset_id).path, limit)

    def outliers(
        self,
        dataset_id: str,
        *,
        threshold: float = THRESHOLD,
        keep_aside: bool = False,
        limit: int = 20,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        on_progress: OnProgress | None = None,
    ) -> OutlierReport:
        """Examples that the profile's base finds far more surprising than the rest, the most surprising first.

        `threshold`: from how many spreads above the median. `keep_aside`: make a new dataset in which they are kept
        aside; this one stays as it is. `limit`: tell at most so many. `on_progress` hears how many are scored, of how
        many. Runs the base in a process of its own, on the device that training would use.
        """
        session, dataset = self._session, self._find(dataset_id)
        wish = Wish(threshold, keep_aside, limit, *(() if on_progress is None else (on_progress,)))
        wish.check()
        checked, _, _ = check(
            session.database, session.workspace, dataset.profile, overrides=overrides, environ=session.environ
        )
        timing = session.settings.worker
        return find_outliers(session.database, session.workspace, timing, checked, dataset, wish, actor=session.actor)

    def leave_aside(self, dataset_id: str, *, reason: str) -> Dataset:
        """A person has looked and leaves the rows that were not released where they are; they wait for nobody now."""
        dataset, said = self._find(dataset_id), check_reason(reason)
        with self._session.database.write() as tx:
            kept_aside.decide(tx, dataset.id, actor=self._session.actor, reason=said, released=None)
        return dataset

    def release(self, dataset_id: str, numbers: Sequence[int], target: str | Path, *, reason: str) -> Released:
        """Write rows that were kept aside to a file that can be prepared; who released them and why is kept."""
        dataset, said = self._find(dataset_id), check_reason(reason)
        if not numbers:
            raise UsageError("name the rows to release by their numbers, which `dataset quarantine` shows")
        folder = self._session.workspace.data_dir / dataset.path
        screens = DatasetReport.model_validate(read_manifest(folder).meta).options.screens
        released = kept_aside.release(folder, numbers, Path(target), [screen.value for screen in screens])
        with self._session.database.write() as tx:
            kept_aside.decide(tx, dataset.id, actor=self._session.actor, reason=said, released=(numbers, released))
        return released

    def erasures(self, dataset_id: str) -> list[Erasure]:
        """Which forgotten experiences were taken out, or wait to be, the oldest first."""
        dataset = self._find(dataset_id)
        with self._session.database.read() as tx:
            return erasures.of_dataset(tx, dataset.id)

    def _find(self, dataset_id: str) -> Dataset:
        with self._session.database.read() as tx:
            return datasets.find(tx, dataset_id)
