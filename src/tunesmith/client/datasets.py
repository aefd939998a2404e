"""`client.datasets`: prepare files, assemble experiences, list, show, verify, compare, export, review quarantine.

What only some of it needs is imported there: listings stay quick.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args

from tunesmith.client.views import ExportedFile
from tunesmith.core.errors import DataError, UsageError, did_you_mean, quoted
from tunesmith.core.files import read_manifest
from tunesmith.datasets.listings import Dataset, newest
from tunesmith.evaluation.rules.outliers import THRESHOLD
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.datasets.diff import DatasetDiff
    from tunesmith.datasets.prepare import Progress, ReadOptions
    from tunesmith.datasets.quarantine.review import QuarantinedRow, Released
    from tunesmith.datasets.report import DatasetReport, MixReport
    from tunesmith.evaluation.outliers import OnProgress, OutlierReport
    from tunesmith.experience.assemble import WantedKind
    from tunesmith.experience.forgetting.queries.erasures import Erasure
    from tunesmith.profiles.checks import CheckedProfile

_FORMS = ("jsonl", "parquet")


class Mixing(TypedDict, total=False):
    """What may be wished of the mix for once; what is missing or None is as `experience.mix` of the profile says."""

    task_types: Sequence[str] | None
    max_examples: int | None
    min_new: int | None
    seed: int | None


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
        **reading: Unpack[ReadOptions],
    ) -> tuple[Dataset, DatasetReport]:
        """Validate, split and publish files, or all that match a pattern, as one dataset of the profile.

        `format`: one of docs/data.md, found out unless told. `windows`: whole, last or all. `where`: conditions like
        "lang=en". `max_examples`: stop after so many.
        """
        from tunesmith.datasets.prepare import prepare_dataset
        from tunesmith.orchestration.check import check

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

    def assemble(
        self,
        profile: str,
        *,
        kind: WantedKind = "auto",
        overrides: Sequence[str] | Mapping[str, Any] = (),
        **mixing: Unpack[Mixing],
    ) -> tuple[Dataset, DatasetReport]:
        """Choose among the profile's experiences, and make a dataset that reserves them: for 24 h, or for its runs.

        `kind`: sft for answers, preference for pairs of a correction and the answer it corrects; auto: whichever the
        profile's method learns from. Refused where there are fewer new ones than `min_new`.
        """
        from tunesmith.experience.assemble import assemble

        checked = self._mixed(profile, kind, overrides, mixing)
        session = self._session
        made = assemble(session.database, session.workspace, checked, kind=kind, actor=session.actor)
        return made.dataset, made.report

    def preview_assembly(
        self,
        profile: str,
        *,
        kind: WantedKind = "auto",
        overrides: Sequence[str] | Mapping[str, Any] = (),
        **mixing: Unpack[Mixing],
    ) -> MixReport:
        """What `assemble` would choose now, before screens look at it; changes nothing."""
        from tunesmith.experience.assemble import preview

        checked = self._mixed(profile, kind, overrides, mixing)
        return preview(self._session.database, self._session.workspace, checked, kind=kind)

    def _mixed(
        self, profile: str, kind: str, overrides: Sequence[str] | Mapping[str, Any], mixing: Mixing
    ) -> CheckedProfile:
        """The profile with what is wished of its mix laid over it."""
        from tunesmith.experience.assemble import WantedKind
        from tunesmith.orchestration.check import check

        if kind not in get_args(WantedKind):
            raise UsageError(f"no kind {quoted(kind)}{did_you_mean(kind, get_args(WantedKind))}")
        wished = {f"experience.mix.{name}": value for name, value in mixing.items() if value is not None}
        laid: Sequence[str] | Mapping[str, Any]
        if isinstance(overrides, Mapping):
            laid = {**overrides, **wished}
        else:
            laid = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in wished.items())]
        session = self._session
        checked, _, _ = check(session.database, session.workspace, profile, overrides=laid, environ=session.environ)
        return checked

    def show(self, dataset_id: str) -> tuple[Dataset, DatasetReport]:
        from tunesmith.datasets.report import DatasetReport

        dataset = self._find(dataset_id)
        meta = read_manifest(self._session.workspace.data_dir / dataset.path).meta
        return dataset, DatasetReport.model_validate(meta)

    def verify(self, dataset_id: str) -> Dataset:
        """Recompute the fingerprint from the bytes on disk; raises if the dataset is not what it says."""
        from tunesmith.datasets.reading import verify

        dataset = self._find(dataset_id)
        try:
            verify(self._session.workspace.data_dir / dataset.path, dataset.fingerprint)
        except OSError as error:
            raise DataError(f"dataset {dataset.id} cannot be read: {error}") from error
        return dataset

    def diff(self, before: str, after: str) -> DatasetDiff:
        """Return the examples added and removed from the first dataset to the second."""
        from tunesmith.datasets.diff import diff

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
        from tunesmith.datasets.export import export
        from tunesmith.datasets.report import Split

        dataset, path = self._find(dataset_id), Path(target)
        chosen = form or ("parquet" if path.suffix == ".parquet" else "jsonl")
        for given, known in ((chosen, _FORMS), (split, tuple(Split))):
            if given is not None and given not in known:
                what = "form" if known is _FORMS else "split"
                raise UsageError(f"no {what} {quoted(given)}{did_you_mean(given, map(str, known))}")
        splits = tuple(Split) if split is None else (Split(split),)
        folder = self._session.workspace.data_dir / dataset.path
        num_examples = export(folder, path, chosen, splits, replace=force)
        return ExportedFile(dataset.id, path, chosen, num_examples, path.stat().st_size)

    def quarantine(self, dataset_id: str, *, limit: int = 20) -> list[QuarantinedRow]:
        """Return the first quarantined rows, with the reasons; every text in them is safe to show."""
        from tunesmith.datasets.quarantine import review as quarantine_review

        if limit < 1:
            raise UsageError(f"limit is {limit}; show at least one row")
        return quarantine_review.rows(self._session.workspace.data_dir / self._find(dataset_id).path, limit)

    def outliers(
        self,
        dataset_id: str,
        *,
        threshold: float = THRESHOLD,
        quarantine: bool = False,
        limit: int = 20,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        on_progress: OnProgress | None = None,
        keep_aside: bool = False,
    ) -> OutlierReport:
        """Return examples with a far higher loss under the profile's base than the rest, the highest first.

        `threshold`: how many spreads above the median. `quarantine` (or its former name `keep_aside`): make a new
        dataset in which they are quarantined; this one is not changed. `limit`: the most that are returned.
        `on_progress` is called with the number of examples scored and the total. The base runs in its own process, on
        the device that training would use.
        """
        from tunesmith.evaluation.outliers import OutlierOptions, find_outliers
        from tunesmith.orchestration.check import check

        session, dataset = self._session, self._find(dataset_id)
        hooks = () if on_progress is None else (on_progress,)
        options = OutlierOptions(threshold, quarantine or keep_aside, limit, *hooks)
        options.check()
        checked, _, _ = check(
            session.database, session.workspace, dataset.profile, overrides=overrides, environ=session.environ
        )
        timing = session.settings.worker
        return find_outliers(
            session.database, session.workspace, timing, checked, dataset, options, actor=session.actor
        )

    def dismiss_quarantined(self, dataset_id: str, *, reason: str) -> Dataset:
        """Record that a person keeps all rows that were not released in quarantine; they leave the inbox."""
        from tunesmith.datasets.quarantine import review as quarantine_review
        from tunesmith.experience.review import check_reason

        dataset, checked_reason = self._find(dataset_id), check_reason(reason)
        with self._session.database.write() as tx:
            quarantine_review.decide(tx, dataset.id, actor=self._session.actor, reason=checked_reason, released=None)
        return dataset

    def leave_aside(self, dataset_id: str, *, reason: str) -> Dataset:
        """The former name of `dismiss_quarantined`."""
        return self.dismiss_quarantined(dataset_id, reason=reason)

    def release(self, dataset_id: str, numbers: Sequence[int], target: str | Path, *, reason: str) -> Released:
        """Write quarantined rows to a file that can be prepared. Who released them and why is recorded."""
        from tunesmith.datasets.quarantine import review as quarantine_review
        from tunesmith.datasets.report import DatasetReport
        from tunesmith.experience.review import check_reason

        dataset, checked_reason = self._find(dataset_id), check_reason(reason)
        if not numbers:
            raise UsageError("name the rows to release by their numbers, which `dataset quarantine` shows")
        folder = self._session.workspace.data_dir / dataset.path
        screens = DatasetReport.model_validate(read_manifest(folder).meta).options.screens
        released = quarantine_review.release(folder, numbers, Path(target), [screen.value for screen in screens])
        with self._session.database.write() as tx:
            quarantine_review.decide(
                tx, dataset.id, actor=self._session.actor, reason=checked_reason, released=(numbers, released)
            )
        return released

    def erasures(self, dataset_id: str) -> list[Erasure]:
        """Which forgotten experiences were taken out, or wait to be, the oldest first."""
        from tunesmith.experience.forgetting.queries import erasures

        dataset = self._find(dataset_id)
        with self._session.database.read() as tx:
            return erasures.of_dataset(tx, dataset.id)

    def _find(self, dataset_id: str) -> Dataset:
        from tunesmith.datasets import queries as datasets

        with self._session.database.read() as tx:
            return datasets.find(tx, dataset_id)

    def list(self, profile: str | None = None) -> list[Dataset]:  # last: it hides the built-in name in this class
        profile = self._session.known_profile(profile)
        return self._session.look(lambda reader: newest(reader, profile=profile, limit=100))
