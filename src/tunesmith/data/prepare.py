"""Prepares a dataset: JSONL files in, one published folder out, streamed; or a refusal and nothing at all.

Each line is validated, scored, deduplicated and put into the split that the hash of its prompt names.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from tunesmith.data.conversations import BadRow
from tunesmith.data.dedupe import SeenHashes
from tunesmith.data.readers import Block, LineReader, LongLine, size_of
from tunesmith.data.rows import Row, RowParser
from tunesmith.data.scoring import score
from tunesmith.data.splitting import group_of, split_of
from tunesmith.data.staging import staging_for
from tunesmith.data.tally import Tally
from tunesmith.domain.dataset import (
    DatasetReport,
    Kind,
    LengthBucket,
    PreparedDataset,
    PrepareOptions,
    Reason,
    SourceFile,
    Split,
    fingerprint,
    identity,
)
from tunesmith.errors import Conflict, DataError, UsageError
from tunesmith.files import publish_folder

Progress = Callable[[int, int, int], None]
"""Called with bytes done, bytes in all, and rows so far; what it raises ends the preparation."""


def prepare(
    sources: Sequence[Path], out_dir: Path, options: PrepareOptions, *, on_progress: Progress | None = None
) -> PreparedDataset:
    """Publish the dataset of these files, in this order, as the folder `out_dir`.

    Again with the same content is fine; a folder that holds something else is never replaced.
    """
    if not sources:
        raise UsageError("no source given; name at least one JSONL file")
    total = sum(size_of(path) for path in sources)  # refuses what is not a regular file before anything is read
    with staging_for(out_dir) as staged, _Intake(staged, options) as intake:
        done = 0
        files: list[SourceFile] = []
        for path in sources:
            with LineReader(path, options.max_line_bytes) as reader:
                for block in reader.blocks():
                    intake.take(block, len(files), reader.name)
                    if on_progress is not None:
                        on_progress(done + reader.bytes_done, total, intake.num_rows)
                done += reader.bytes_done
                files.append(reader.described())
        report = intake.finish(files)
        try:
            publish_folder(staged, out_dir, report.model_dump(mode="json"))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise Conflict(f"{out_dir.name} already holds something else; prepare this under a new id") from None
    return PreparedDataset(out_dir, report.fingerprint, report.counts, report)


class _Intake:
    """Takes lines, keeps what is valid and new, and writes it to its split."""

    def __init__(self, staged: Path, options: PrepareOptions) -> None:
        from tunesmith.data.columns import SplitWriter  # pyarrow takes longer to import than `--help` may take

        self.num_rows = 0
        self._options = options
        self._parser = RowParser()
        self._tally = Tally()
        self._seen = SeenHashes()
        self._kind: Kind | None = None
        self._num_blank = 0
        self._num_duplicates = 0
        self._writers = {split: SplitWriter(staged / f"{split.value}.parquet") for split in Split}

    def __enter__(self) -> _Intake:
        return self

    def __exit__(self, *raised: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def take(self, block: Block | LongLine, source: int, name: str) -> None:
        """Take the next lines of a source."""
        if isinstance(block, LongLine):
            self.num_rows += 1
            self._tally.add(name, block.line, self._too_long(block))
            return
        parse, last = self._parser.parse, len(block.lines) - 1
        for index, line in enumerate(block.lines):
            try:
                row = parse(line, ends_open=block.ends_open and index == last)
                if row is None:
                    self._num_blank += 1
                    continue
                self._keep(row, source, block.first_line + index)
            except BadRow as bad:
                if bad.at_byte is not None:
                    bad.problem += f" at byte {block.offset_of(index) + bad.at_byte} of the file"
                self._tally.add(name, block.first_line + index, bad)
            self.num_rows += 1
        if self._seen.num > self._options.max_examples:
            limit = self._options.max_examples
            raise DataError(f"{name}: more than {limit} examples, which is max_examples; split the source")

    def _keep(self, row: Row, source: int, line: int) -> None:
        codes, contents, num_prompt, num_chosen = row
        kind = Kind.PREFERENCE if len(codes) > num_prompt + num_chosen else Kind.SUPERVISED
        if kind is not self._kind:
            self._settle_kind(kind)
        example_id = identity(codes, contents, num_prompt, num_chosen)
        if not self._seen.add(int(example_id[:16], 16)):
            self._num_duplicates += 1
            return
        group = group_of(codes[:num_prompt], contents)
        options = self._options
        split = split_of(group, options.heldout_share, options.validation_share)
        quality = score(contents[num_prompt - 1], contents[num_prompt + num_chosen - 1])
        self._writers[split].add(example_id, group, row, quality, source, line)

    def _settle_kind(self, kind: Kind) -> None:
        """The first valid row decides what the dataset is."""
        if self._kind is None:
            self._kind = kind
            return
        problem = f"is a {kind} row in a dataset of {self._kind} rows"
        raise BadRow(Reason.MIXED_KIND, "", problem, "prepare the two kinds as two datasets")

    def _too_long(self, line: LongLine) -> BadRow:
        limit = self._options.max_line_bytes
        return BadRow(Reason.TOO_LONG, "", f"has {line.num_bytes} bytes, more than {limit}", "split or remove the line")

    def finish(self, files: Sequence[SourceFile]) -> DatasetReport:
        """Write what is left; the report, or a refusal."""
        self._tally.refuse_too_many(self.num_rows, self._options.max_bad_share)
        for writer in self._writers.values():
            writer.finish()
        digests = {split: writer.digest for split, writer in self._writers.items()}
        counts = {split: digest.num for split, digest in digests.items()}
        if self._kind is None:
            raise DataError(f"{_names(files)}: only blank lines; give files with one JSON object per line")
        _refuse_empty_splits(counts, self._options)
        num_examples = sum(counts.values())
        return DatasetReport(
            fingerprint=fingerprint(digests),
            kind=self._kind,
            counts=counts,
            num_lines=sum(file.num_lines for file in files),
            num_blank=self._num_blank,
            num_duplicates=self._num_duplicates,
            drops=self._tally.drops(),
            ignored_fields=dict(sorted(self._parser.ignored_fields.items())),
            warnings=self._warnings(counts),
            sources=tuple(files),
            options=self._options,
            lengths=_buckets([writer.lengths for writer in self._writers.values()]),
            mean_score=round(sum(writer.total_score for writer in self._writers.values()) / num_examples, 4),
        )

    def _warnings(self, counts: dict[Split, int]) -> tuple[str, ...]:
        found = []
        heldout = counts[Split.HELDOUT]
        if heldout < self._options.few_heldout:
            found.append(f"only {heldout} examples are held out; the gate may need more to see a difference")
        if not counts[Split.VALIDATION] and self._options.validation_share:
            found.append("no example fell into validation; training cannot tell its best step")
        if self._tally.num_bad:
            found.append(f"{self._tally.num_bad} bad lines were left out")
        if self._parser.ignored_fields:
            found.append(f"fields that nobody reads: {', '.join(sorted(self._parser.ignored_fields)[:10])}")
        return tuple(found)


def _names(files: Sequence[SourceFile]) -> str:
    return ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")


def _refuse_empty_splits(counts: dict[Split, int], options: PrepareOptions) -> None:
    num = sum(counts.values())
    if num == 1:
        raise DataError("there is one example only, so nothing can be held out to judge it; add more examples")
    for split, share in ((Split.HELDOUT, options.heldout_share), (Split.TRAIN, None)):
        if not counts[split]:
            what = "held out" if split is Split.HELDOUT else "left to train on"
            setting = f"raise heldout_share (now {share:g})" if share is not None else "lower heldout_share"
            raise DataError(
                f"none of the {num} examples is {what}: the split goes by the hash of the prompt; "
                f"add examples with different prompts, or {setting}"
            )


def _buckets(lengths: Sequence[Sequence[int]]) -> tuple[LengthBucket, ...]:
    totals = [sum(column) for column in zip(*lengths, strict=True)]
    return tuple(LengthBucket(below=1 << bits, num=num) for bits, num in enumerate(totals) if num)
