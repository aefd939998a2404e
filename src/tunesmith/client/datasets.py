"""`client.datasets`: prepare files, assemble experiences, list, show, verify, compare, export."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args

from tunesmith.client.kept_rows import KeptRows
from tunesmith.client.views import ExportedFile
from tunesmith.core.errors import DataError, UsageError, did_you_mean, quoted
from tunesmith.core.files import read_manifest
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.prepare import Progress, Reading, prepare_dataset
from tunesmith.datasets.queries import Dataset
from tunesmith.datasets.report import DatasetReport, Split
from tunesmith.experience.assemble import WantedKind, assemble, preview
from tunesmith.orchestration.check import check

if TYPE_CHECKING:
    from tunesmith.datasets.diff import DatasetDiff
    from tunesmith.datasets.report import MixReport
    from tunesmith.profiles.checks import CheckedProfile

_FORMS = ("jsonl", "parquet")


class Mixing(TypedDict, total=False):
    """What may be wished of the mix for once; what is missing or None is as `experience.mix` of the profile says."""

    task_types: Sequence[str] | None
    max_examples: int | None
    min_new: int | None
    seed: int | None


class Datasets(KeptRows):
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
        checked = self._mixed(profile, kind, overrides, mixing)
        return preview(self._session.database, self._session.workspace, checked, kind=kind)

    def _mixed(
        self, profile: str, kind: str, overrides: Sequence[str] | Mapping[str, Any], mixing: Mixing
    ) -> CheckedProfile:
        """The profile with what is wished of its mix laid over it."""
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
        from tunesmith.datasets.reading import verify

        dataset = self._find(dataset_id)
        try:
            verify(self._session.workspace.data_dir / dataset.path, dataset.fingerprint)
        except OSError as error:
            raise DataError(f"dataset {dataset.id} cannot be read: {error}") from error
        return dataset

    def diff(self, before: str, after: str) -> DatasetDiff:
        """What the second dataset has, and has not, that the first one has not, and has."""
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
