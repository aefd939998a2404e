"""Counts the bad lines by reason, keeps the first few of each, and decides whether there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import DataError
from tunesmith.datasets.bad_row import BadRow
from tunesmith.datasets.example import Reason

if TYPE_CHECKING:
    from tunesmith.datasets.report import Drops, SourceFile

_KEPT_PER_REASON = 20
_REASONS_SHOWN = 5

_Kept = tuple[int, int, str, str, str]  # source, line, field, problem, fix


class Tally:
    """What could not be used, and why. Holds the first few lines of each reason only, whatever a file holds."""

    def __init__(self) -> None:
        self._num: dict[Reason, int] = {}
        self._first: dict[Reason, list[_Kept]] = {}

    @property
    def num_bad(self) -> int:
        return sum(self._num.values())

    def add(self, source: int, line: int, bad: BadRow) -> None:
        self._count(bad.reason, 1, [(source, line, bad.field, bad.problem, bad.fix)])

    def merge(self, later: Tally) -> None:
        """Add what was found further on."""
        for reason, num in later._num.items():
            self._count(reason, num, later._first[reason])

    def _count(self, reason: Reason, num: int, first: Sequence[_Kept]) -> None:
        self._num[reason] = self._num.get(reason, 0) + num
        kept = self._first.setdefault(reason, [])
        kept += first[: _KEPT_PER_REASON - len(kept)]

    def to_json(self) -> dict[str, Any]:
        return {reason.value: [num, self._first[reason]] for reason, num in self._num.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        tally = cls()
        for reason, (num, first) in values.items():
            tally._count(Reason(reason), num, first)
        return tally

    def drops(self, files: Sequence[SourceFile]) -> tuple[Drops, ...]:
        """By reason, the most frequent first; equals in the order in which they were met."""
        from tunesmith.datasets.report import BadLine, Drops  # not at the top: a child that parses never needs them

        order = sorted(self._num, key=lambda reason: -self._num[reason])
        return tuple(
            Drops(
                reason=reason,
                num=self._num[reason],
                first=tuple(
                    BadLine(
                        source=files[source].name,
                        line=line,
                        field=field,
                        reason=reason,
                        problem=problem,
                        fix=fix,
                        unit=files[source].unit,
                    )
                    for source, line, field, problem, fix in self._first[reason]
                ),
            )
            for reason in order
        )

    def refuse_too_many(self, num_lines: int, max_share: float, files: Sequence[SourceFile]) -> None:
        """Raise when more than the allowed share of the lines is bad, or all of them."""
        num_bad = self.num_bad
        if not num_bad or (num_bad < num_lines and num_bad <= max_share * num_lines):
            return
        drops = self.drops(files)
        told = "; ".join(f"{drop.num} × {drop.reason}, first {drop.first[0]}" for drop in drops[:_REASONS_SHOWN])
        more = f"; {len(drops) - _REASONS_SHOWN} more reasons" if len(drops) > _REASONS_SHOWN else ""
        units = f"{files[0].unit}s" if len({file.unit for file in files}) == 1 else "lines"
        if num_bad == num_lines:
            share = f"all {num_lines} {units} are bad" if num_lines > 1 else f"the only {units[:-1]} is bad"
        else:
            share = f"{num_bad} of {num_lines} {units} are bad, more than max_bad_share ({max_share:g}) allows"
        raise DataError(f"{share}: {told}{more}")
