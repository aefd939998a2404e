"""A dataset: immutable ordered examples with splits and a fingerprint of their content, never of file names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tunesmith.core.section import Section, Share
from tunesmith.datasets.example import Example, Kind, Reason, Split
from tunesmith.profiles.sections.experience import Mix
from tunesmith.profiles.sections.screens import Screen, ScreenLimits


class MemberRole(StrEnum):
    """Why an experience is in a dataset."""

    GOLD = "gold"
    CORRECTED = "corrected"  # with the answer it should have had
    REPLAY = "replay"  # learnt before, so that it is not forgotten


MixKind = Literal["sft", "preference"]
"""sft: answers to learn. preference: pairs of a correction and the answer it corrects."""


class MixReport(Section):
    """How a dataset was assembled from experiences; kept in its manifest."""

    policy: Mix
    kind: MixKind
    max_accumulated: int | None = None
    """For a training from the bare base, made of what was ever learnt and what is new: the most that may be trained."""
    roles: dict[MemberRole, int]
    """How many of each are trained."""
    num_new: int
    """How many of these were never learnt."""
    num_reserved: int
    """Experiences that the dataset reserved: all that are new, held out or not."""
    shortages: tuple[str, ...]
    left_out: dict[str, int]
    """Why other experiences of the profile are not in, with how many of each."""
    warning: str | None = None
    """Of a preview: why a run on these would be held."""
    refusal: str | None = None
    """Of a preview: why no dataset would be made of these."""


__all__ = [
    "BadLine",
    "DatasetReport",
    "Drops",
    "Example",
    "Kind",
    "LengthBucket",
    "PrepareOptions",
    "PreparedDataset",
    "Quarantined",
    "SourceFile",
    "Split",
    "SplitDigest",
    "Suspect",
    "fingerprint",
]


class SplitDigest:
    """The digest of one split, fed with the ids of its examples in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num = 0

    def update(self, ids: Sequence[str]) -> None:
        self._hash.update("".join(ids).encode())
        self.num += len(ids)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def fingerprint(splits: Mapping[Split, SplitDigest]) -> str:
    """The dataset's fingerprint: which examples, in which order, in which split."""
    lines = [f"{split.value} {splits[split].num} {splits[split].hexdigest()}" for split in Split]
    return hashlib.sha256("\n".join(["tunesmith dataset 1", *lines]).encode()).hexdigest()


Unit = Literal["line", "item", "row"]
"""What a source is counted in: the lines of JSONL, the items of a JSON array, the rows of a Parquet file."""
Format = Literal[
    "auto", "openai", "sharegpt", "alpaca", "completion", "preference", "kto", "langfuse", "mlflow"
]  # fmt: skip
"""What the objects of a source look like; `auto`: each tells by the names of its fields."""
Windows = Literal["whole", "last", "all"]


class BadLine(Section):
    """One line that cannot be used, and what to do about it. Never holds the line's content."""

    source: str
    """The name of the file."""
    line: int
    field: str
    """Empty: the whole line."""
    reason: Reason
    problem: str
    fix: str
    unit: Unit = "line"

    def __str__(self) -> str:
        return (
            f"{self.source} {self.unit} {self.line}: {self.field + ' ' if self.field else ''}{self.problem}; {self.fix}"
        )


class Drops(Section):
    """The lines dropped for one reason."""

    reason: Reason
    num: int
    first: tuple[BadLine, ...]


class SourceFile(Section):
    name: str
    """Without its folders: a dataset does not say where on a machine it came from."""
    sha256: str
    num_bytes: int
    num_lines: int
    """Lines, items or rows that were looked at."""
    unit: Unit = "line"


class Suspect(Section):
    """One finding in a quarantined row. The excerpt never repeats a secret."""

    source: str
    line: int
    field: str
    start: int
    """In characters of the field; `end` is behind the last one."""
    end: int
    reason: str
    excerpt: str
    unit: Unit = "line"

    def __str__(self) -> str:
        return f"{self.source} {self.unit} {self.line}: {self.reason}{': ' + self.excerpt if self.excerpt else ''}"


class Quarantined(Section):
    """The rows that one screen quarantined; a row may be counted by several screens."""

    screen: str
    num: int
    first: tuple[Suspect, ...]


class LengthBucket(Section):
    """How many examples have fewer than `below` characters, and no fewer than the bucket before."""

    below: int
    num: int


class PrepareOptions(Section):
    heldout_share: float = Field(default=0.1, gt=0.0, lt=0.9)
    """Share of prompts, by hash, that are never trained on."""
    validation_share: float = Field(default=0.05, ge=0.0, lt=0.9)
    """Share of prompts, by hash, for validation inside training."""
    split_number: int = 0
    """Which split of the profile these shares belong to; see ProfileLock."""
    max_bad_share: Share = 0.1
    """Refuse sources with more than this share of bad lines."""
    max_examples: int = Field(default=20_000_000, ge=1)
    """Refuse more examples than this."""
    max_line_bytes: int = Field(default=4 << 20, ge=1024, le=64 << 20)
    """A longer line is bad; it is skipped without being held in memory."""
    control_tokens: tuple[str, ...] = ()
    """Texts that the base model reads as control tokens; a line that holds one could forge a turn, so it is bad."""
    screens: tuple[Screen, ...] = ()
    """Screens that every row is checked with; suspect rows are quarantined."""
    detectors: tuple[str, ...] = ()
    """Installed detectors that search every text too."""
    limits: ScreenLimits = ScreenLimits()
    """How much may come from one place."""
    few_heldout: int = Field(default=50, ge=0)
    """Warn when fewer examples than this are held out."""
    format: Format = "auto"
    """Read the sources as this format only."""
    windows: Windows = "whole"
    """Of a conversation with several answers: learn all as one example, only the last, or each as an example."""
    where: tuple[str, ...] = ()
    """FIELD=VALUE or FIELD!=VALUE: only objects that meet all of them are read."""
    first_examples: int | None = Field(default=None, ge=1)
    """Stop once there are so many."""
    overruled: dict[int, tuple[Screen, ...]] = Field(default_factory=dict)
    """By line of the first source: screens whose findings in it a person has overruled."""

    @model_validator(mode="after")
    def _room_to_train(self) -> PrepareOptions:
        if self.heldout_share + self.validation_share >= 1.0:
            raise ValueError("heldout_share + validation_share: leave something to train on, together below 1")
        return self


class DatasetReport(Section):
    """What went into a dataset and what did not; kept in its manifest."""

    v: Literal[1] = 1
    fingerprint: str
    kind: Kind
    counts: dict[Split, int]
    """Examples per split."""
    num_undesirable: dict[Split, int] = Field(default_factory=dict)
    """Of these, the answers to avoid; only where examples are labelled."""
    num_lines: int
    num_blank: int
    num_duplicates: int
    """Exact copies of an earlier example, dropped."""
    passed_over: dict[str, int] = Field(default_factory=dict)
    """What was left aside on purpose, with how often: filtered out, or no part of a conversation."""
    drops: tuple[Drops, ...]
    num_quarantined: int = 0
    """Suspect rows, kept whole in quarantine.jsonl and not trained."""
    quarantine: tuple[Quarantined, ...] = ()
    """The same by screen."""
    ignored_fields: dict[str, int]
    """Fields nobody reads, with how many times each was seen."""
    warnings: tuple[str, ...]
    sources: tuple[SourceFile, ...]
    options: PrepareOptions
    lengths: tuple[LengthBucket, ...]
    """Characters per example."""
    mean_score: float
    mix: MixReport | None = None
    """Where it was assembled from experiences: what it was mixed from, and why others are not in."""
    earlier_fingerprints: tuple[str, ...] = ()
    """What it was before forgotten experiences were taken out, the oldest first."""


@dataclass(frozen=True)
class PreparedDataset:
    """A published dataset."""

    path: Path
    fingerprint: str
    counts: dict[Split, int]
    report: DatasetReport
