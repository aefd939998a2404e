"""Makes a new dataset from another one in which some examples are quarantined."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import publish_folder, verify_folder
from tunesmith.core.staging import staging_for
from tunesmith.datasets.dataset_screens import rewrite_without, row_position
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import few_heldout
from tunesmith.datasets.quarantine.file import SCREEN, Quarantine
from tunesmith.datasets.quarantine.undecided import FILE_NAME
from tunesmith.datasets.reading import summary
from tunesmith.datasets.report import DatasetReport, PreparedDataset, Quarantined, fingerprint
from tunesmith.datasets.screens.finding import ScreenFinding

_KEPT_PER_SCREEN = 20
_ADDED = "added.jsonl"
ExampleIndex = tuple[Split, int]
"""An example: its split and its index in it, from 0."""


def quarantine_examples(folder: Path, final: Path, reasons: Mapping[ExampleIndex, str], name: str) -> PreparedDataset:
    """Publish `final`: the dataset `name` in `folder` without the examples in `reasons`.

    These are appended to its quarantine.jsonl, each with its reason.
    """
    manifest = verify_folder(folder)  # a damaged dataset is not made to look whole
    splits = {f"{split.value}.parquet" for split in Split}
    if unknown := sorted(set(manifest.files) - splits - {FILE_NAME}):
        raise DataError(f"{folder}: {unknown[0]} is no file of a dataset that was prepared from files; prepare it anew")
    report = summary(folder).report
    findings = {row_position(*place): ScreenFinding(SCREEN, 0, 0, 0, reason, "") for place, reason in reasons.items()}
    with staging_for(final) as staged:
        for split in splits:
            shutil.copyfile(folder / split, staged / split)
        aside = Quarantine(staged / _ADDED)
        try:
            writers = rewrite_without(staged, lambda begin, end: _between(findings, begin, end), aside, report.sources)
        finally:
            aside.close()
        if aside.num != len(reasons):
            raise DataError(f"{folder}: {len(reasons)} outliers were found, but it holds {aside.num} of them")
        _join(folder / FILE_NAME, staged / _ADDED, staged / FILE_NAME)
        made = _described(report, writers, aside.report(report.sources), name)
        _refuse_empty(made)
        publish_folder(staged, final, made.model_dump(mode="json"))
    return PreparedDataset(final, made.fingerprint, made.counts, made)


def _between(findings: Mapping[int, ScreenFinding], begin: int, end: int) -> dict[int, ScreenFinding]:
    return {place: findings[place] for place in range(begin, end) if place in findings}


def _join(known: Path, added: Path, target: Path) -> None:
    """What lay aside before, then what is added; for its owner only, because it may hold secrets in full."""
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        for part in (known, added):
            if part.is_file():
                with part.open("rb") as source:
                    shutil.copyfileobj(source, sink)
    added.unlink()


def _described(
    report: DatasetReport, writers: Mapping[Split, Any], added: Sequence[Quarantined], name: str
) -> DatasetReport:
    digests = {split: writer.digest for split, writer in writers.items()}
    lengths = sum((writer.lengths for writer in writers.values()), Counter[int]())
    num = sum(digest.num for digest in digests.values())
    undesirable = {split: writer.num_undesirable for split, writer in writers.items()}
    num_added = sum(each.num for each in added)
    counts = {split: digest.num for split, digest in digests.items()}
    changes = {
        "fingerprint": fingerprint(digests),
        "counts": counts,
        "num_undesirable": undesirable if report.num_undesirable else {},
        "lengths": [{"below": 1 << bits, "num": each} for bits, each in sorted(lengths.items())],
        "mean_score": round(sum(writer.total_score for writer in writers.values()) / num, 4) if num else 0.0,
        "num_quarantined": report.num_quarantined + num_added,
        "quarantine": [each.model_dump() for each in _joined(report.quarantine, added)],
        "warnings": _warnings(report, counts[Split.HELDOUT] - undesirable[Split.HELDOUT], num_added, name),
    }
    return DatasetReport.model_validate({**report.model_dump(), **changes})


def _warnings(report: DatasetReport, heldout: int, num_added: int, name: str) -> tuple[str, ...]:
    before = report.counts[Split.HELDOUT] - report.num_undesirable.get(Split.HELDOUT, 0)
    stale = few_heldout(before, report.options)
    kept = [warning for warning in report.warnings if warning not in stale]
    outliers = f"{num_added} loss {'outlier' if num_added == 1 else 'outliers'} of dataset {name}"
    return (*few_heldout(heldout, report.options), *kept, f"{outliers} quarantined; see quarantine.jsonl")


def _joined(known: Sequence[Quarantined], added: Sequence[Quarantined]) -> list[Quarantined]:
    """By screen, the most frequent first."""
    by_screen = {each.screen: each for each in known}
    for each in added:
        before = by_screen.get(each.screen)
        num, first = (before.num, before.first) if before is not None else (0, ())
        changes = {"num": num + each.num, "first": (*first, *each.first)[:_KEPT_PER_SCREEN]}
        by_screen[each.screen] = each.model_copy(update=changes)
    return sorted(by_screen.values(), key=lambda each: -each.num)


def _refuse_empty(report: DatasetReport) -> None:
    """Something must be left to train on, and something to judge by."""
    for split in (Split.TRAIN, Split.HELDOUT):
        if report.counts[split] - report.num_undesirable.get(split, 0) < 1:
            raise DataError(f"without its outliers, no answer to learn would be left in {split}; add more examples")
