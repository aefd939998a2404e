"""Reads published datasets, and checks that they are what their fingerprint says from the bytes on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from tunesmith.core.errors import DataError
from tunesmith.core.files import Manifest, read_manifest, verify_folder
from tunesmith.datasets.example import Example, Split, codes_of, encode_message
from tunesmith.datasets.report import DatasetReport, PreparedDataset, SplitDigest, fingerprint
from tunesmith.datasets.splits import group_of


def iter_examples(folder: Path, split: Split | str) -> Iterator[Example]:
    """The examples of one split in order, streamed; each text is checked against the example's id on the way."""
    from tunesmith.datasets.split_files import read_examples

    return read_examples(folder / f"{Split(split).value}.parquet")


def read_split(folder: Path, split: Split | str) -> list[Example]:
    """The examples of one split, all in memory."""
    return list(iter_examples(folder, split))


def fingerprint_of(folder: Path) -> str:
    """The fingerprint of what the files really hold, recomputed from every text in them."""
    digests = {split: SplitDigest() for split in Split}
    for split, digest in digests.items():
        for example in iter_examples(folder, split):
            digest.update([example.id])
    return fingerprint(digests)


def verify(folder: Path, expected: str) -> None:
    """Raise unless the files have their hashes, and the examples in them have that fingerprint and their groups."""
    report = _report_of(folder, verify_folder(folder))
    digests = {split: SplitDigest() for split in Split}
    for split, digest in digests.items():
        for example in iter_examples(folder, split):
            digest.update([example.id])
            if not _has_its_group(example):
                raise DataError(
                    f"{folder}: example {example.id[:12]}… is in a foreign group; prepare the dataset again"
                )
    found = fingerprint(digests)
    if found != expected or report.fingerprint != expected:
        raise DataError(
            f"{folder}: its content is {found[:12]}…, its manifest says {report.fingerprint[:12]}…, "
            f"expected {expected[:12]}…; prepare the dataset again"
        )


def _has_its_group(example: Example) -> bool:
    """Whether its group is that of its prompt, or, for a window of a conversation, of what began the conversation."""
    prompt = [encode_message(message) for message in example.prompt]
    codes, contents = codes_of(prompt), [message["content"] for message in prompt]
    if example.group == group_of(codes, contents):
        return True
    begin = next((place for place, code in enumerate(codes) if code in "cC"), 0)
    return begin > 0 and example.group == group_of(codes[:begin], contents)


def summary(folder: Path) -> PreparedDataset:
    """What a published dataset's manifest says about it."""
    report = _report_of(folder, read_manifest(folder))
    return PreparedDataset(folder, report.fingerprint, report.counts, report)


def _report_of(folder: Path, manifest: Manifest) -> DatasetReport:
    if manifest.meta.get("v") != 1:
        raise DataError(f"{folder}: not a dataset that this version reads; upgrade tunesmith, or prepare it again")
    try:
        return DatasetReport.model_validate(manifest.meta)
    except ValidationError:
        raise DataError(f"{folder}: its manifest does not describe a dataset; prepare it again") from None
