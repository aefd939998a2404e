"""Import: files in any form that datasets are made of become experiences, each answer one, in two passes.

The first pass only looks, so that a file with too many bad lines stores nothing; the second stores, many in one
transaction. What was stored before is known by its content, so an import that was cut short is simply made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import DataError, Refused, StoreError, TunesmithError, UsageError
from tunesmith.datasets.example import decode_message
from tunesmith.datasets.report import PrepareOptions, SourceFile
from tunesmith.experience import capture
from tunesmith.experience.capture import Capture, CaptureRules, CheckedCapture
from tunesmith.experience.queries import assessments, experiences
from tunesmith.experience.rules.experience import Context
from tunesmith.experience.rules.feedback import LABEL_RATER, Rating
from tunesmith.store.database import Database

if TYPE_CHECKING:
    from tunesmith.datasets.blocks import BlockParser, ParsedBlock

Progress = Callable[[int, int, int], None]
_TOGETHER = 100  # in one transaction: well below a second
_SHOWN = 20


@dataclass
class ImportReport:
    """What came of importing files, so far."""

    num_rows: int = 0
    num_new: int = 0
    num_known: int = 0
    num_refused: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    """Of the new ones."""
    problems: list[str] = field(default_factory=list)
    """Of the first lines that were left out: file, line, reason, what to do."""
    last_id: str | None = None
    num_forgotten: int = 0
    """Of those known before; they stay forgotten."""

    def refuse(self, problem: str, num: int = 1) -> None:
        self.num_refused += num
        if len(self.problems) < _SHOWN:
            self.problems.append(problem)


@dataclass(frozen=True)
class ImportOptions:
    """How files are imported into a profile."""

    profile: str
    rules: CaptureRules
    actor: str
    source: str | None = None
    """What the experiences say they came from; unset: the file's name."""


def import_files(
    database: Database, sources: Sequence[Path], options: ImportOptions, on_progress: Progress | None = None
) -> ImportReport:
    """Store every answer in the files as an experience; raises, and stores nothing, where too many lines are bad."""
    from tunesmith.datasets.blocks import BlockParser
    from tunesmith.datasets.parse_pool import ParseRules
    from tunesmith.datasets.readers.text import size_of
    from tunesmith.datasets.sources import expanded

    files = expanded(sources)
    if not files:
        raise UsageError("no source given; name at least one file")
    total = 2 * sum(size_of(path) for path in files)  # refuses what is not a regular file before anything is read
    reading = PrepareOptions(windows="all")
    rules = ParseRules(reading.heldout_share, reading.validation_share, reading.max_line_bytes, windows="all")
    parser = BlockParser(rules)
    report = ImportReport()
    described = _look(files, reading, parser, options.rules.max_bad_share, report)
    for number, path in enumerate(files):
        digest = described[number].sha256
        for name, parsed in _parsed(path, number, reading, parser, digest):
            _store(database, list(_captures(parsed, name, options)), options, report)
            if on_progress is not None:
                on_progress(total // 2 + parsed.end, total, report.num_new + report.num_known)
    return report


def _look(
    files: Sequence[Path], reading: PrepareOptions, parser: BlockParser, max_bad_share: float, report: ImportReport
) -> list[SourceFile]:
    """Read everything once; the files as they were found."""
    from tunesmith.datasets.rejected_rows import RejectedRows
    from tunesmith.datasets.sources import open_source

    rejected, described = RejectedRows(), []
    for number, path in enumerate(files):
        num_lines = 0
        with open_source(path, number, reading) as reader:
            for block in reader.blocks():
                parsed = parser.parse(block)
                rejected.merge(parsed.bad)
                report.num_rows += parsed.num_rows
                num_lines += parsed.num_rows + parsed.num_blank
            reader.finish()
            described.append(
                SourceFile(
                    name=reader.name,
                    sha256=reader.sha256,
                    num_bytes=reader.num_bytes,
                    num_lines=num_lines,
                    unit=reader.unit,
                )
            )
    rejected.refuse_too_many(report.num_rows, max_bad_share, described)
    for drop in rejected.rejections(described):
        report.num_refused += drop.num
        report.problems += [str(line) for line in drop.first[: max(0, _SHOWN - len(report.problems))]]
    return described


def _parsed(
    path: Path, number: int, reading: PrepareOptions, parser: BlockParser, digest: str
) -> Iterator[tuple[str, ParsedBlock]]:
    from tunesmith.datasets.sources import open_source

    with open_source(path, number, reading) as reader:
        for block in reader.blocks():
            yield reader.name, parser.parse(block)
        reader.finish()
        if reader.sha256 != digest:
            raise DataError(f"{reader.name} changed while it was imported; import it again when nothing writes to it")


def _captures(parsed: ParsedBlock, name: str, options: ImportOptions) -> Iterator[tuple[str, Capture]]:
    """Every answer of a block, and where it stands. Windows of one conversation share a session."""
    rows = parsed.batch.select(["id", "line", "messages", "rejected", "num_prompt"]).to_pylist()
    for line, group in groupby(rows, key=lambda row: row["line"]):
        windows = list(group)
        session = f"import-{windows[0]['id'][:16]}" if len(windows) > 1 else None
        for row in windows:
            context = Context(source=options.source or name, session=session)
            yield f"{name} line {line}", replace(_capture(row), key=row["id"], context=context)


def _capture(row: dict[str, Any]) -> Capture:
    """A row as an interaction: a label is a rating of its answer, a better answer is a correction of the worse."""
    messages, rejected = _plain(row["messages"]), row["rejected"]
    if rejected is None:
        return Capture(messages)
    if not rejected:
        return Capture(messages, ratings=(Rating(LABEL_RATER, 1.0),))
    prompt, chosen = messages[: row["num_prompt"]], messages[row["num_prompt"] :]
    worse = [*prompt, *_plain(rejected)]
    if not chosen:
        return Capture(worse, ratings=(Rating(LABEL_RATER, 0.0),))
    better = chosen[0]["content"] if len(chosen) == 1 and "tool_calls" not in chosen[0] else ""
    return Capture(worse, ratings=(Rating(LABEL_RATER, correction=better),))


def _plain(stored: Sequence[Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in decode_message(message).items() if key != "weight"} for message in stored]


def _store(
    database: Database, captures: list[tuple[str, Capture]], options: ImportOptions, report: ImportReport
) -> None:
    ready: list[tuple[str, CheckedCapture]] = []
    for where, each in captures:
        try:
            ready.append((where, capture.check(each, options.rules)))
        except (DataError, UsageError, Refused) as error:
            report.refuse(f"{where}: {error.message}")
    for start in range(0, len(ready), _TOGETHER):
        part = ready[start : start + _TOGETHER]
        try:
            _store_part(database, part, options, report)
        except StoreError:
            raise
        except TunesmithError:  # one of them spoils it for the others: each by itself
            for item in part:
                try:
                    _store_part(database, [item], options, report)
                except (DataError, UsageError, Refused) as error:
                    report.refuse(f"{item[0]}: {error.message}")


def _store_part(
    database: Database, part: list[tuple[str, CheckedCapture]], options: ImportOptions, report: ImportReport
) -> None:
    with database.write(bulk=True) as tx:
        kept = [capture.store(tx, options.profile, each, options.rules, actor=options.actor) for _, each in part]
        classes = [assessments.get(tx, each.id).class_name.value for each in kept if each.is_new]
        num_forgotten = experiences.num_forgotten(tx, [each.id for each in kept if not each.is_new])
    report.last_id = kept[-1].id
    report.num_new += len(classes)
    report.num_known += len(kept) - len(classes)
    report.num_forgotten += num_forgotten
    for name in classes:
        report.classes[name] = report.classes.get(name, 0) + 1
