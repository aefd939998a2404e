"""From files to one published folder, streamed, without store or profile; or a refusal and nothing at all.

Each line, item or row is validated, scored, deduplicated and put into the split that the hash of its prompt names.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import Conflict, DataError, UsageError
from tunesmith.core.files import publish_folder
from tunesmith.core.staging import staging_for
from tunesmith.datasets.dedupe import SeenHashes
from tunesmith.datasets.example import BadRow, Kind, Reason, Split
from tunesmith.datasets.messages import count_ignored
from tunesmith.datasets.parse_pool import ParsePool, ParseRules
from tunesmith.datasets.readers.text import Block, LineReader, size_of
from tunesmith.datasets.rejected_rows import RejectedRows
from tunesmith.datasets.report import (
    DatasetReport,
    LengthBucket,
    PreparedDataset,
    PrepareOptions,
    Quarantined,
    SourceFile,
    fingerprint,
)
from tunesmith.datasets.screens.contamination import HeldCase, write_cases
from tunesmith.datasets.sources import open_source, read_conditions
from tunesmith.datasets.splits import write_kept

if TYPE_CHECKING:
    from tunesmith.datasets.blocks import ParsedBlock
    from tunesmith.datasets.readers.parquet import ParquetReader

_LARGE = 32 << 20  # bytes; below it, starting processes costs more than they save
_MAX_PROCESSES = 4  # more would wait for the one that deduplicates and writes

Progress = Callable[[int, int, int], None]
"""Called with bytes done, bytes in all, and rows so far; what it raises ends the preparation."""


def prepare(
    sources: Sequence[Path],
    out_dir: Path,
    options: PrepareOptions,
    *,
    cases: Sequence[HeldCase] = (),
    kept: Mapping[str, Split] | None = None,
    on_progress: Progress | None = None,
    num_processes: int | None = None,
) -> PreparedDataset:
    """Publish the dataset of these files, in this order, as the folder `out_dir`.

    Repeating it with the same content is fine; a folder that holds something else is never replaced. A row that
    overlaps one of the `cases`, which the model is judged on, is quarantined. A group in `kept` has that split,
    whatever the shares say. How many processes parse is decided by the size of the files unless told; the result is the
    same to the byte.
    """
    if not sources:
        raise UsageError("no source given; name at least one file")
    read_conditions(options.where)  # refuses what is no condition before anything is read
    total = sum(size_of(path) for path in sources)  # refuses what is not a regular file before anything is read
    files: list[SourceFile] = []
    num_processes = num_processes or (1 if total < _LARGE else min(_num_cpus(), _MAX_PROCESSES))
    with (
        staging_for(out_dir) as staged,
        _readable(cases, kept or {}) as (cases_file, kept_file),
        _Intake(staged, options) as intake,
        _parsing(_rules_of(options, cases_file, kept_file), num_processes) as parse,
    ):
        done = 0
        for path in sources:
            with open_source(path, len(files), options) as reader:
                num_lines = 0
                for parsed in parse(reader.blocks()):
                    intake.take(parsed, len(files), reader.name)
                    num_lines += parsed.num_rows + parsed.num_blank
                    if on_progress is not None:
                        on_progress(done + parsed.end, total, intake.num_rows)
                    if intake.is_full:
                        break
                reader.finish()
                intake.ignore(reader.ignored)
                done += reader.num_bytes
                files.append(_described(reader, num_lines))
            if intake.is_full:
                break
        report = intake.finish(files)
        _publish(staged, out_dir, report)
    return PreparedDataset(out_dir, report.fingerprint, report.counts, report)


@contextmanager
def _readable(cases: Sequence[HeldCase], kept: Mapping[str, Split]) -> Iterator[tuple[str, str]]:
    """The cases, and the groups that keep their split, as files for every process that parses; no name for none."""
    if not cases and not kept:
        yield "", ""
        return
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:  # for its owner only
        cases_file, kept_file = Path(folder) / "cases.json", Path(folder) / "kept.json"
        if cases:
            write_cases(cases_file, cases)
        if kept:
            write_kept(kept_file, kept)
        yield str(cases_file) if cases else "", str(kept_file) if kept else ""


def _rules_of(options: PrepareOptions, cases_file: str, kept_file: str) -> ParseRules:
    return ParseRules(
        options.heldout_share,
        options.validation_share,
        options.max_line_bytes,
        options.control_tokens,
        options.format,
        options.windows,
        options.where,
        options.screens,
        cases_file,
        kept_file,
        options.detectors,
    )


def _described(reader: LineReader | ParquetReader, num_lines: int) -> SourceFile:
    return SourceFile(
        name=reader.name, sha256=reader.sha256, num_bytes=reader.num_bytes, num_lines=num_lines, unit=reader.unit
    )


def _num_cpus() -> int:
    """The processors this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _publish(staged: Path, out_dir: Path, report: DatasetReport) -> None:
    for is_last in (False, True):  # a second look, in case somebody published the same content in between
        try:
            publish_folder(staged, out_dir, report.model_dump(mode="json"))
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if is_last:
                raise Conflict(f"{out_dir.name} already holds something else; prepare this under a new id") from None


@contextmanager
def _parsing(rules: ParseRules, num_processes: int) -> Iterator[Callable[[Iterable[Block]], Iterator[ParsedBlock]]]:
    """How to parse blocks in order: here, or in child processes."""
    if num_processes > 1:
        with ParsePool(rules, num_processes) as pool:
            yield pool.parse
        return
    from tunesmith.datasets.blocks import BlockParser

    yield partial(map, BlockParser(rules).parse)


class _Intake:
    """Takes parsed blocks, keeps what is new, and writes it to its split."""

    def __init__(self, staged: Path, options: PrepareOptions) -> None:
        from tunesmith.datasets.dataset_screens import DatasetScreens
        from tunesmith.datasets.quarantine.file import Quarantine
        from tunesmith.datasets.quarantine.undecided import FILE_NAME
        from tunesmith.datasets.split_files import SplitWriter  # pyarrow takes longer to import than `--help` may take

        self.num_rows = 0
        self._staged = staged
        self._dataset_screens = DatasetScreens(options)
        self._options = options
        self._rejected = RejectedRows()
        self._seen = SeenHashes()
        self._kind: Kind | None = None
        self._num_blank = 0
        self._num_duplicates = 0
        self._passed_over: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._quarantine = Quarantine(staged / FILE_NAME, options.overruled)
        self._writers = {split: SplitWriter(staged / f"{split.value}.parquet") for split in Split}

    def __enter__(self) -> _Intake:
        return self

    def __exit__(self, *raised: object) -> None:
        self._quarantine.close()
        for writer in self._writers.values():
            writer.close()

    def take(self, parsed: ParsedBlock, source: int, name: str) -> None:
        """Take the next lines of a source."""
        from tunesmith.datasets.split_files import kept_rows, keys_of, part

        self.num_rows += parsed.num_rows
        self._num_blank += parsed.num_blank
        self._rejected.merge(parsed.bad)
        self.ignore(parsed.ignored_fields)
        for why, num in parsed.passed_over.items():
            count_ignored(self._passed_over, why, num)
        batch = self._of_one_kind(parsed.batch, source)
        if self._options.first_examples is not None:
            batch = batch.slice(0, self._num_that_fit(keys_of(batch)))
        keep = bytes(map(self._seen.add, keys_of(batch)))
        self._num_duplicates += keep.count(0)
        keep = self._quarantine.sift(batch, keep, parsed.screened, source, name)
        if not self._dataset_screens.is_off:
            self._dataset_screens.note(kept_rows(batch, keep), parsed.screened.openings, source)
        for split, rows in part(batch, keep):
            self._writers[split].write(rows)
        if self._seen.num > self._options.max_examples:
            limit = self._options.max_examples
            raise DataError(f"{name}: more than {limit} examples, which is max_examples; split the source")

    @property
    def is_full(self) -> bool:
        """Whether as many examples as were asked for are in."""
        return self._seen.num == self._options.first_examples

    def ignore(self, fields: Mapping[str, int]) -> None:
        """Count fields that nobody reads; those of a filter were read."""
        filtered = {condition.path[0] for condition in read_conditions(self._options.where)}
        for field, num in fields.items():
            if field not in filtered:
                count_ignored(self._ignored, field, num)

    def _num_that_fit(self, keys: Sequence[int]) -> int:
        """How many rows may be taken before there are as many examples as were asked for."""
        room = (self._options.first_examples or 0) - self._seen.num
        new: set[int] = set()
        for place, key in enumerate(keys):
            if key not in new and not self._seen.has(key):
                if len(new) == room:
                    return place
                new.add(key)
        return len(keys)

    def _of_one_kind(self, batch: Any, source: int) -> Any:
        """The rows of the dataset's kind, which its first valid row decides; the others are bad."""
        from tunesmith.datasets.split_files import kind_of_first, part_by_kind

        if batch.num_rows and self._kind is None:
            self._kind = kind_of_first(batch)
        ours, foreign = part_by_kind(batch, self._kind)
        for line, other in foreign:
            problem = f"is a {other} row in a dataset of {self._kind} rows"
            fix = "prepare the two kinds as two datasets"
            if {other, self._kind} == {Kind.LABELLED, Kind.SUPERVISED}:
                fix = f"give every line a label, or {fix}"
            self._rejected.add(source, line, BadRow(Reason.MIXED_KIND, "", problem, fix))
        return ours

    def finish(self, files: Sequence[SourceFile]) -> DatasetReport:
        """Write what is left; the report, or a refusal."""
        self._rejected.refuse_too_many(self.num_rows, self._options.max_bad_share, files)
        for writer in self._writers.values():
            writer.finish()
        self._screen_dataset(files)
        self._quarantine.close()
        digests = {split: writer.digest for split, writer in self._writers.items()}
        counts = {split: digest.num for split, digest in digests.items()}
        if self._kind is None:
            raise DataError(_nothing(files[0].name, self._passed_over, self._options.where))
        quarantine = self._quarantine.report(files)
        if not any(counts.values()):
            raise DataError(_all_suspect(quarantine))
        _refuse_empty_splits(counts, self._options)
        undesirable = {split: writer.num_undesirable for split, writer in self._writers.items()}
        if self._kind is Kind.LABELLED:
            _refuse_one_label(counts, undesirable, self._options)
        num_examples = sum(counts.values())
        return DatasetReport(
            fingerprint=fingerprint(digests),
            kind=self._kind,
            counts=counts,
            num_undesirable=undesirable if self._kind is Kind.LABELLED else {},
            num_lines=sum(file.num_lines for file in files),
            num_blank=self._num_blank,
            num_duplicates=self._num_duplicates,
            passed_over=dict(self._passed_over),
            drops=self._rejected.rejections(files),
            num_quarantined=self._quarantine.num,
            quarantine=quarantine,
            ignored_fields=dict(sorted(self._ignored.items())),
            warnings=self._warnings(counts, undesirable),
            sources=tuple(files),
            options=self._options,
            lengths=_buckets(sum((writer.lengths for writer in self._writers.values()), Counter())),
            mean_score=round(sum(writer.total_score for writer in self._writers.values()) / num_examples, 4),
        )

    def _screen_dataset(self, files: Sequence[SourceFile]) -> None:
        """Quarantine rows that are suspect only in comparison with all other rows."""
        from tunesmith.datasets.dataset_screens import rewrite_without

        if not self._dataset_screens.is_off and (suspects := self._dataset_screens.suspects(self._staged)):
            self._writers = rewrite_without(self._staged, suspects.between, self._quarantine, files)

    def _warnings(self, counts: dict[Split, int], undesirable: dict[Split, int]) -> tuple[str, ...]:
        found = few_heldout(counts[Split.HELDOUT] - undesirable[Split.HELDOUT], self._options)
        if not counts[Split.VALIDATION] and self._options.validation_share:
            found.append("no example fell into validation; training cannot tell its best step")
        if self._rejected.num_bad:
            found.append(f"{self._rejected.num_bad} bad lines were left out")
        if num := self._quarantine.num:
            found.append(f"{num} suspect {'row was' if num == 1 else 'rows were'} quarantined; see quarantine.jsonl")
        if self._ignored:
            found.append(f"fields that nobody reads: {', '.join(sorted(self._ignored)[:10])}")
        return tuple(found)


def few_heldout(num: int, options: PrepareOptions) -> list[str]:
    """A warning where few examples judge what is trained."""
    if num >= options.few_heldout:
        return []
    return [f"only {num} examples are held out; the gate may need more to see a difference"]


def _nothing(name: str, passed_over: Mapping[str, int], where: Sequence[str]) -> str:
    """Why there is not one example."""
    if not passed_over:
        return f"{name}: only blank lines; give a file with one JSON object per line"
    told = ", ".join(f"{num} × {why}" for why, num in sorted(passed_over.items()))
    fix = "check --where" if where else "export conversations, or generations with their input and output"
    return f"{name}: no example is left: {told}; {fix}"


def _all_suspect(quarantine: Sequence[Quarantined]) -> str:
    told = "; ".join(f"{found.num} × {found.screen}, first {found.first[0]}" for found in quarantine[:3])
    return f"every row is suspect: {told}; remove what was found, or choose other screens (data.screens)"


def _refuse_empty_splits(counts: dict[Split, int], options: PrepareOptions) -> None:
    num = sum(counts.values())
    if num == 1:
        raise DataError("there is one example only, so nothing can be held out to judge it; add more examples")
    for split, what, fix in (
        (Split.HELDOUT, "held out", f"raise heldout_share (now {options.heldout_share:g})"),
        (Split.TRAIN, "left to train on", f"lower heldout_share (now {options.heldout_share:g})"),
    ):
        if not counts[split]:
            raise DataError(
                f"none of the {num} examples is {what}: the split goes by the hash of the prompt; "
                f"add examples with different prompts, or {fix}"
            )


def _refuse_one_label(counts: dict[Split, int], undesirable: dict[Split, int], options: PrepareOptions) -> None:
    """Labels tell something only where there are both; and only a desirable answer can judge a model."""
    bad, num = undesirable[Split.TRAIN], counts[Split.TRAIN]
    if bad in (0, num):
        fix = "add desirable answers" if bad else "add undesirable answers, or remove label to learn them all"
        raise DataError(f"label is {'false' if bad else 'true'} in all {num} examples to train on; {fix}")
    if undesirable[Split.HELDOUT] == counts[Split.HELDOUT]:
        raise DataError(
            f"none of the {counts[Split.HELDOUT]} held-out answers is desirable, so nothing can be judged by them; "
            f"add desirable answers to other prompts, or raise heldout_share (now {options.heldout_share:g})"
        )


def _buckets(lengths: Counter[int]) -> tuple[LengthBucket, ...]:
    return tuple(LengthBucket(below=1 << bits, num=num) for bits, num in sorted(lengths.items()))
