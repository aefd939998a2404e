"""Everything that is known about one version, read once: for its provenance statement and its model card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError, Refused, TunesmithError
from tunesmith.core.files import Manifest, read_capped, read_manifest, verify_folder
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.report import DatasetReport
from tunesmith.lineage import queries
from tunesmith.lineage.rules.describe import members_summary
from tunesmith.models import queries as adapters
from tunesmith.models.bases.place import read_fetched
from tunesmith.models.queries import Adapter
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.resolve import resolve_now
from tunesmith.programs.fingerprint import code_fingerprint, library_versions
from tunesmith.runs.session import Session
from tunesmith.runs.spec_paths import path_from
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.events import RecordedEvent

BARE_BASE = "the bare base"
_LICENCE_LINE = re.compile(r"^license:[ \t]*['\"]?([\w.+-]{1,64})['\"]?[ \t]*$", re.MULTILINE)
_LICENCE_FILE = re.compile(r"(LICEN[SC]E|COPYING)[\w.-]*\Z", re.IGNORECASE)
_MAX_README = 1 << 20
_MAX_EVALUATIONS = 20
_MAX_FLIPS = 2000


@dataclass(frozen=True)
class BaseFacts:
    name: str
    """Its id on a hub where it was fetched from there, else the name of its folder."""
    source: str | None
    revision: str | None
    licence: str | None
    """As the base's own README says in its first lines."""
    licence_file: str | None
    is_there: bool


@dataclass(frozen=True)
class VersionFacts:
    adapter: Adapter
    run: queries.StoredRun
    manifest: Manifest
    """Of the version's folder; every file had the listed hash a moment ago."""
    training: queries.Training | None
    base: BaseFacts
    start: Adapter | None
    dataset: Dataset
    report: DatasetReport | None
    """None where the dataset's manifest cannot be read any more."""
    members: Mapping[str, Any] | None
    """None where it was prepared from files."""
    evaluations: list[queries.StoredEvaluation]
    """The newest first."""
    baselines: Mapping[str, str]
    """By the id of an evaluation, the name of what it compared with."""
    history: list[RecordedEvent]
    lives: list[tuple[queries.Flip, queries.Flip | None]]
    """The flips that put it live, each with the one that ended it; None: it is live."""
    num_answers: int
    answers_are_all: bool
    profile: Profile | None
    """As it is now; None where it cannot be read."""
    libraries: Mapping[str, str] | None
    """Versions that it was trained with; None where they have changed since, so that nobody knows them."""


def read_version(session: Session, name: str) -> VersionFacts:
    """Read it all; refuses a version whose files are not what was registered."""
    data_dir = session.workspace.data_dir
    with session.database.read() as tx:
        adapter = adapters.find(tx, name)
        if adapter.run_id is None:
            raise Refused(f"adapter {adapter.name} was not made by a run, so nothing says how it was made")
        run = queries.run(tx, adapter.run_id)
        dataset = datasets.get(tx, run.dataset_id)
        start = (run.spec.get("start") or {}).get("id")
        evaluations = queries.evaluations_of(tx, adapter.id, _MAX_EVALUATIONS)
        counts = queries.member_counts(tx, dataset.id)
        num_answers, _, has_older = queries.answered_by(tx, adapter.profile, adapter.name, 0)
        stored: dict[str, Any] = {
            "adapter": adapter,
            "run": run,
            "training": queries.training(tx, run.id),
            "start": None if start is None else adapters.get(tx, start),
            "dataset": dataset,
            "members": members_summary(counts) if counts else None,
            "evaluations": evaluations,
            "baselines": {each.id: _baseline(tx, each) for each in evaluations},
            "history": events.of_entity(tx, "adapter", adapter.id),
            "lives": _lives(tx, adapter),
            "num_answers": num_answers,
            "answers_are_all": not has_older,
        }
    return VersionFacts(
        **stored,
        manifest=_verified(adapter, data_dir / adapter.path),
        base=_base(path_from(session.workspace.root, run.spec["base"]["path"]), run.spec["base"]),
        report=_report(data_dir / dataset.path),
        profile=_profile(session, adapter.profile),
        libraries=library_versions() if code_fingerprint() == run.spec["fingerprints"]["code"] else None,
    )


def _verified(adapter: Adapter, folder: Path) -> Manifest:
    try:
        return verify_folder(folder, adapter.digest)
    except OSError as error:
        raise DataError(f"the files of {adapter.name} cannot be read: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(f"adapter {adapter.name} is not what was registered: {error.message}") from error


def _baseline(tx: Tx, evaluation: queries.StoredEvaluation) -> str:
    known = evaluation.baseline_adapter_id
    return BARE_BASE if known is None else adapters.get(tx, known).name


def _lives(tx: Tx, adapter: Adapter) -> list[tuple[queries.Flip, queries.Flip | None]]:
    flips = queries.flips(tx, adapter.profile, _MAX_FLIPS)
    return [(flip, then) for flip, then in zip_longest(flips, flips[1:]) if flip.wanted == adapter.id]


def _base(folder: Path, said: Mapping[str, Any]) -> BaseFacts:
    fetched = read_fetched(folder)
    is_there = folder.is_dir()
    return BaseFacts(
        name=folder.name if fetched is None else fetched.source,
        source=None if fetched is None else fetched.source,
        revision=said.get("revision") or (None if fetched is None else fetched.revision),
        licence=_licence(folder) if is_there else None,
        licence_file=_licence_file(folder) if is_there else None,
        is_there=is_there,
    )


def _licence(folder: Path) -> str | None:
    """The licence in the front matter of the base's README; nothing else in there is read."""
    try:
        text = read_capped(folder / "README.md", _MAX_README, follow_links=True).decode(errors="replace")
    except OSError:
        return None
    if not text.startswith("---\n"):
        return None
    found = _LICENCE_LINE.search(text[: text.find("\n---", 3) + 1])
    return None if found is None else found[1]


def _licence_file(folder: Path) -> str | None:
    try:
        return next((path.name for path in sorted(folder.iterdir()) if _LICENCE_FILE.match(path.name)), None)
    except OSError:
        return None


def _report(folder: Path) -> DatasetReport | None:
    try:
        return DatasetReport.model_validate(read_manifest(folder).meta)
    except (DataError, ValueError):
        return None


def _profile(session: Session, name: str) -> Profile | None:
    try:
        return resolve_now(session.database, session.workspace, name, environ=session.environ)[0].profile
    except TunesmithError:
        return None
