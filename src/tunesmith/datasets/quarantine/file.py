"""Writes suspect rows, with their findings, to the dataset's `quarantine.jsonl`; they are never trained."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tunesmith.datasets.example import to_json
from tunesmith.datasets.report import Quarantined, SourceFile, Suspect
from tunesmith.datasets.screens.block import Screened
from tunesmith.datasets.screens.contradictions import Contradictions
from tunesmith.datasets.screens.finding import ScreenFinding
from tunesmith.datasets.screens.near_duplicates import NearDuplicates
from tunesmith.datasets.split_files import keys_of
from tunesmith.datasets.tally import Tally


class Quarantine:
    """Moves suspect rows to the quarantine file. Keeps the first few of each screen only for the report."""

    def __init__(self, path: Path, overruled: Mapping[int, Collection[str]] | None = None) -> None:
        self.num = 0
        """Number of quarantined rows."""
        self._path = path
        self._overruled = overruled or {}
        self._sink: IO[str] | None = None
        self._near: NearDuplicates | None = None
        self._contradictions: Contradictions | None = None
        self._tally: Tally[str, tuple[int, int, str, ScreenFinding]] = Tally()

    def sift(self, batch: Any, keep: bytes, screened: Screened, source: int, name: str) -> bytes:
        """`keep` without the suspect rows of a parsed batch, which are written to the file."""
        if not screened.findings and not screened.signatures and not screened.answers:
            return keep
        kept = bytearray(keep)
        lines: list[int] = batch.column("line").to_pylist()
        for place, key in enumerate(keys_of(batch)):
            if not kept[place]:
                continue
            findings = self._in_row(key, screened, source, lines[place])
            findings = findings or self._beside_earlier(key, screened, source, lines[place])
            if findings:
                kept[place] = 0
                self.put(batch.slice(place, 1), findings, source, name)
        return bytes(kept)

    def _in_row(self, key: int, screened: Screened, source: int, line: int) -> Sequence[ScreenFinding]:
        """What is suspect about a row itself, but for what a person has overruled."""
        findings = screened.findings.get(key, ())
        overruled = self._overruled.get(line, ()) if source == 0 else ()
        return [finding for finding in findings if finding.screen not in overruled] if overruled else findings

    def _beside_earlier(self, key: int, screened: Screened, source: int, line: int) -> list[ScreenFinding]:
        """What is suspect about a row because of an earlier one."""
        if (signature := screened.signatures.get(key)) is not None:
            self._near = self._near or NearDuplicates()  # not sooner: it takes memory
            if (earlier := self._near.earlier(source, line, signature)) is not None:
                reason = f"says almost the same as {_told(earlier, source)}, in the question and in the answer"
                return [ScreenFinding("near_copy", 0, 0, 0, reason, "")]
        if (answer := screened.answers.get(key)) is not None:
            self._contradictions = self._contradictions or Contradictions()
            if (earlier := self._contradictions.earlier(source, line, answer)) is not None:
                reason = f"answers the same question otherwise than {_told(earlier, source)}; one of the two is wrong"
                return [ScreenFinding("contradiction", 0, 0, 0, reason, "")]
        return []

    def put(self, row: Any, findings: Sequence[ScreenFinding], source: int, name: str) -> None:
        """Write one row to the quarantine file."""
        fields = row.select(["line", "messages", "rejected"]).to_pylist()[0]
        num_messages = len(fields["messages"])
        told = []
        found: dict[str, list[tuple[int, int, str, ScreenFinding]]] = {}
        for finding in findings:
            place = finding.message
            field = f"messages[{place}]" if place < num_messages else f"rejected[{place - num_messages}]"
            told.append({"screen": finding.screen, "field": field, "start": finding.start, "end": finding.end})
            told[-1] |= {"reason": finding.reason, "excerpt": finding.excerpt}
            found.setdefault(finding.screen, []).append((source, fields["line"], field, finding))
        for screen, suspects in found.items():
            self._tally.count(screen, 1, suspects)
        if self._sink is None:  # for its owner only: it may hold secrets in full
            self._sink = os.fdopen(
                os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            )
        self._sink.write(to_json({"source": name, "line": fields.pop("line"), "findings": told, **fields}) + "\n")
        self.num += 1

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def report(self, files: Sequence[SourceFile]) -> tuple[Quarantined, ...]:
        """By screen, the most frequent first; equals in the order in which they were met."""
        return tuple(
            Quarantined(
                screen=screen,
                num=num,
                first=tuple(
                    Suspect(
                        source=files[source].name,
                        line=line,
                        field=field,
                        start=finding.start,
                        end=finding.end,
                        reason=finding.reason,
                        excerpt=finding.excerpt,
                        unit=files[source].unit,
                    )
                    for source, line, field, finding in first
                ),
            )
            for screen, num, first in self._tally.most_frequent_first()
        )


def _told(earlier: tuple[int, int], source: int) -> str:
    return f"line {earlier[1]}" + ("" if earlier[0] == source else f" of source {earlier[0] + 1}")


SCREEN = "loss_outlier"
"""Screen name of rows that are quarantined as loss outliers."""
