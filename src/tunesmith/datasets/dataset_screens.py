"""Screens the dataset as a whole: quarantines rows that are suspect only in comparison with all other rows.

While rows come in, a few numbers are noted. Only if these say that there may be something, the rows that were written
are read again; and only if there is, they are written again without the suspects.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tunesmith.datasets.example import Split
from tunesmith.datasets.quarantine.file import Quarantine
from tunesmith.datasets.report import PrepareOptions, SourceFile
from tunesmith.datasets.screens.backdoor_triggers import Openings, TriggerClusters, opening_of
from tunesmith.datasets.screens.finding import ScreenFinding
from tunesmith.datasets.screens.outliers import GRAIN_BITS, Languages, Lengths, length_reason
from tunesmith.datasets.screens.quotas import SourceRows, TemplateRows, allowed
from tunesmith.datasets.split_files import SplitWriter
from tunesmith.profiles.sections.screens import Screen

_READ_ROWS = 4096
_SPLIT_BITS = 40


class Suspects:
    """Suspect rows by position (`row_position`), eight bytes each."""

    def __init__(self) -> None:
        self._groups: list[tuple[array[int], ScreenFinding]] = []

    def __bool__(self) -> bool:
        return any(places for places, _ in self._groups)

    def group(self, screen: Screen, reason: str, *, first: bool = False) -> array[int]:
        """A new group of rows with one reason, to be filled in their order; what comes first is told of a row."""
        places = array("Q")
        self._groups.insert(
            0 if first else len(self._groups), (places, ScreenFinding(screen.value, 0, 0, 0, reason, ""))
        )
        return places

    def between(self, begin: int, end: int) -> dict[int, ScreenFinding]:
        """What is suspect from one place up to another."""
        found: dict[int, ScreenFinding] = {}
        for places, finding in self._groups:
            for place in places[bisect_left(places, begin) : bisect_left(places, end)]:
                found.setdefault(place, finding)
        return found


class DatasetScreens:
    """Collects statistics while rows are written, then finds the suspects of the whole dataset."""

    def __init__(self, options: PrepareOptions) -> None:
        chosen, limits = frozenset(options.screens), options.limits
        self._limits = limits
        self._lengths = Lengths() if Screen.LENGTH_OUTLIER in chosen else None
        self._openings = Openings() if Screen.RARE_TRIGGER in chosen else None
        self._has_languages = Screen.LANGUAGE_OUTLIER in chosen
        has_source_limit = limits.max_per_source is not None or limits.max_source_share is not None
        self._sources = SourceRows() if has_source_limit and Screen.SOURCE_LIMIT in chosen else None
        self._max_per_template = limits.max_per_template if Screen.TEMPLATE_LIMIT in chosen else None
        self._clusters: TriggerClusters | None = None
        self._languages: Languages | None = None
        self.is_off = not (chosen & _SCREENS)

    def note(self, rows: Any, openings: Mapping[int, int], source: int) -> None:
        """Take note of rows that are kept, all of one source."""
        if self._lengths is not None:
            steps = pc.value_counts(pc.shift_right(rows.column("num_chars"), GRAIN_BITS))
            self._lengths.add(dict(zip(*(steps.field(place).to_pylist() for place in (0, 1)), strict=True)))
        if self._openings is not None or self._sources is not None:
            keys = rows.column("key").to_pylist()
            if self._openings is not None:
                add = self._openings.add
                for key in keys:
                    if key in openings:
                        add(openings[key])
            if self._sources is not None:
                self._sources.add(source, keys)

    def suspects(self, staged: Path) -> Suspects:
        """Which of the rows that were written are suspect beside all others."""
        found = Suspects()
        looks = list(self._looks(found))
        if looks:
            for split_place, split in enumerate(Split):
                begin = split_place << _SPLIT_BITS
                with pq.ParquetFile(staged / f"{split.value}.parquet") as file:
                    for batch in file.iter_batches(_READ_ROWS, columns=_COLUMNS):
                        rows = _Rows(begin, batch)
                        for look in looks:
                            look(rows)
                        begin += batch.num_rows
        self._conclude(found)
        return found

    def _looks(self, found: Suspects) -> Iterator[Callable[[_Rows], None]]:
        """What must be done with the rows; nothing where the notes rule every suspicion out."""
        if self._openings is not None and self._openings.has_any:
            self._clusters = TriggerClusters(self._openings)
            yield self._gather_clusters
        if self._lengths is not None and (limit := self._lengths.limit) is not None:
            long = found.group(Screen.LENGTH_OUTLIER, length_reason(limit))
            yield lambda rows: rows.mark_long(limit, long)
        if self._has_languages:
            self._languages = Languages()
            yield self._gather_languages
        if self._sources is not None:
            left = allowed(self._sources.num, self._limits.max_per_source, self._limits.max_source_share)
            if left != self._sources.num:
                stays = self._sources.chosen(left).stays
                surplus = found.group(Screen.SOURCE_LIMIT, "is more than one source may give (data.limits)")
                yield lambda rows: rows.mark_surplus(stays, surplus)
        if (most := self._max_per_template) is not None:
            template_stays = TemplateRows(most).stays
            reason = f"begins like {most} questions before it, as many as there may be (data.limits)"
            alike = found.group(Screen.TEMPLATE_LIMIT, reason)
            yield lambda rows: rows.mark_template(template_stays, alike)

    def _gather_clusters(self, rows: _Rows) -> None:
        assert self._clusters is not None
        for number, answer in rows.answers():
            opening = opening_of(answer)
            if self._clusters.wants_question(opening):
                self._clusters.add(rows.begin + number, opening, rows.question(number))

    def _gather_languages(self, rows: _Rows) -> None:
        assert self._languages is not None
        for number, answer in rows.answers():
            self._languages.add(rows.begin + number, answer)

    def _conclude(self, found: Suspects) -> None:
        """Add what only shows once all rows were read; it says more than a limit does."""
        for gathered, screen in ((self._clusters, Screen.RARE_TRIGGER), (self._languages, Screen.LANGUAGE_OUTLIER)):
            if gathered is not None:
                for places, reason in gathered.found():
                    found.group(screen, reason, first=True).extend(places)


_SCREENS = frozenset(
    {
        Screen.RARE_TRIGGER,
        Screen.LENGTH_OUTLIER,
        Screen.LANGUAGE_OUTLIER,
        Screen.SOURCE_LIMIT,
        Screen.TEMPLATE_LIMIT,
    }
)
_COLUMNS = ["id", "messages", "num_prompt", "num_chars", "source"]


class _Rows:
    """Some written rows, read again."""

    def __init__(self, begin: int, batch: Any) -> None:
        self.begin = begin
        self._batch = batch
        self._messages = batch.column("messages")
        self._ends = self._messages.offsets.to_pylist()
        self._num_prompts = batch.column("num_prompt").to_pylist()
        self._texts = self._messages.values.field("content")
        self._roles = self._messages.values.field("role")

    @cached_property
    def _said(self) -> list[tuple[str, str]]:
        return list(zip(self._roles.to_pylist(), self._texts.to_pylist(), strict=True))

    def answers(self) -> Iterator[tuple[int, str]]:
        """The first answer to learn of each row that has one."""
        firsts = [end + num for end, num in zip(self._ends, self._num_prompts, strict=False)]
        numbers = [number for number, first in enumerate(firsts) if first < self._ends[number + 1]]
        texts = self._texts.take([firsts[number] for number in numbers])
        return zip(numbers, texts.to_pylist(), strict=True)

    def question(self, number: int) -> str:
        """What a row asks, without the system message and the definitions of functions."""
        begin = self._ends[number]
        said = self._said[begin : begin + self._num_prompts[number]]
        return "\n".join([text for role, text in said if role not in ("system", "tools")])

    def mark_long(self, limit: int, marked: array[int]) -> None:
        numbers = pc.indices_nonzero(pc.greater(self._batch.column("num_chars"), limit)).to_pylist()
        marked.extend(self.begin + number for number in numbers)

    def mark_surplus(self, stays: Callable[[int, int], bool], marked: array[int]) -> None:
        columns = (self._batch.column(name).to_pylist() for name in ("source", "id"))
        for number, (source, example_id) in enumerate(zip(*columns, strict=True)):
            if not stays(source, int(example_id[:16], 16)):
                marked.append(self.begin + number)

    def mark_template(self, stays: Callable[[str], bool], marked: array[int]) -> None:
        for number in range(self._batch.num_rows):
            if not stays(self.question(number)):
                marked.append(self.begin + number)


def row_position(split: Split, number: int) -> int:
    """Return a row's position in the dataset: its split in the high bits, its index in the split in the low ones."""
    return (tuple(Split).index(split) << _SPLIT_BITS) + number


def rewrite_without(
    staged: Path,
    suspects: Callable[[int, int], Mapping[int, ScreenFinding]],
    quarantine: Quarantine,
    files: Sequence[SourceFile],
) -> dict[Split, Any]:
    """Rewrite the splits without the suspects, which are quarantined. Return the finished writers.

    `suspects` returns the suspects between two positions.
    """
    writers = {}
    for split in Split:
        path, begin = staged / f"{split.value}.parquet", row_position(split, 0)
        fresh = path.with_suffix(".again")
        writers[split] = SplitWriter(fresh)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_READ_ROWS):
                bad = {place - begin: why for place, why in suspects(begin, begin + batch.num_rows).items()}
                for number, finding in sorted(bad.items()):
                    row, source = batch.slice(number, 1), batch.column("source")[number].as_py()
                    quarantine.put(row, [finding], source, files[source].name)
                kept = batch.filter(pa.array([n not in bad for n in range(batch.num_rows)])) if bad else batch
                if kept.num_rows:
                    writers[split].write(kept)
                begin += batch.num_rows
        writers[split].finish()
        fresh.replace(path)
    return writers
