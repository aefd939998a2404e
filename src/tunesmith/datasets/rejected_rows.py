"""Counts rejected rows by reason, keeps the first few of each, and raises if there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import DataError
from tunesmith.datasets.example import BadRow, Reason
from tunesmith.datasets.tally import Tally

if TYPE_CHECKING:
    from tunesmith.datasets.report import Drops, SourceFile

_REASONS_SHOWN = 5

_Kept = tuple[int, int, str, str, str]  # source, line, field, problem, fix


class RejectedRows:
    """Rejected rows by reason. Keeps the first few of each reason only, so its size does not depend on the file."""

    def __init__(self) -> None:
        self._tally: Tally[Reason, _Kept] = Tally()

    @property
    def num_bad(self) -> int:
        return self._tally.total

    def add(self, source: int, line: int, bad: BadRow) -> None:
        self._tally.count(bad.reason, 1, [(source, line, bad.field, bad.problem, bad.fix)])

    def merge(self, later: RejectedRows) -> None:
        """Add the rows that were rejected further on in the file."""
        for reason, num, first in later._tally.in_order_met():
            self._tally.count(reason, num, first)

    def to_json(self) -> dict[str, Any]:
        return {reason.value: [num, first] for reason, num, first in self._tally.in_order_met()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RejectedRows:
        rejected = cls()
        for reason, (num, first) in values.items():
            rejected._tally.count(Reason(reason), num, first)
        return rejected

    def rejections(self, files: Sequence[SourceFile]) -> tuple[Drops, ...]:
        """Return the rejected rows by reason, the most frequent first; ties in the order of the file."""
        from tunesmith.datasets.report import BadLine, Drops  # not at the top: a child that parses never needs them

        return tuple(
            Drops(
                reason=reason,
                num=num,
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
                    for source, line, field, problem, fix in first
                ),
            )
            for reason, num, first in self._tally.most_frequent_first()
        )

    def refuse_too_many(self, num_lines: int, max_share: float, files: Sequence[SourceFile]) -> None:
        """Raise DataError if more than `max_share` of the rows were rejected, or all of them."""
        num_bad = self.num_bad
        if not num_bad or (num_bad < num_lines and num_bad <= max_share * num_lines):
            return
        drops = self.rejections(files)
        told = "; ".join(f"{drop.num} × {drop.reason}, first {drop.first[0]}" for drop in drops[:_REASONS_SHOWN])
        more = f"; {len(drops) - _REASONS_SHOWN} more reasons" if len(drops) > _REASONS_SHOWN else ""
        units = f"{files[0].unit}s" if len({file.unit for file in files}) == 1 else "lines"
        if num_bad == num_lines:
            share = f"all {num_lines} {units} are bad" if num_lines > 1 else f"the only {units[:-1]} is bad"
        else:
            share = f"{num_bad} of {num_lines} {units} are bad, more than max_bad_share ({max_share:g}) allows"
        raise DataError(f"{share}: {told}{more}")
