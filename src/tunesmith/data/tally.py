"""Counts the bad lines by reason, keeps the first few of each, and decides whether there are too many."""

from __future__ import annotations

from tunesmith.data.conversations import BadRow
from tunesmith.domain.dataset import BadLine, Drops, Reason
from tunesmith.errors import DataError

_KEPT_PER_REASON = 20
_REASONS_SHOWN = 5


class Tally:
    """What could not be used, and why."""

    def __init__(self) -> None:
        self.num_bad = 0
        self._num: dict[Reason, int] = {}
        self._first: dict[Reason, list[BadLine]] = {}

    def add(self, source: str, line: int, bad: BadRow) -> None:
        self.num_bad += 1
        self._num[bad.reason] = self._num.get(bad.reason, 0) + 1
        kept = self._first.setdefault(bad.reason, [])
        if len(kept) < _KEPT_PER_REASON:
            kept.append(
                BadLine(source=source, line=line, field=bad.field, reason=bad.reason, problem=bad.problem, fix=bad.fix)
            )

    def drops(self) -> tuple[Drops, ...]:
        """By reason, the most frequent first; equals in the order in which they were met."""
        order = sorted(self._num, key=lambda reason: -self._num[reason])
        return tuple(Drops(reason=reason, num=self._num[reason], first=tuple(self._first[reason])) for reason in order)

    def refuse_too_many(self, num_lines: int, max_share: float) -> None:
        """Raise when more than the allowed share of the lines is bad, or all of them."""
        if not self.num_bad or (self.num_bad < num_lines and self.num_bad <= max_share * num_lines):
            return
        drops = self.drops()
        told = "; ".join(f"{drop.num} × {drop.reason}, first: {drop.first[0]}" for drop in drops[:_REASONS_SHOWN])
        more = f"; {len(drops) - _REASONS_SHOWN} more reasons" if len(drops) > _REASONS_SHOWN else ""
        if self.num_bad == num_lines:
            share = f"all {num_lines} lines are bad" if num_lines > 1 else "the only line is bad"
        else:
            share = f"{self.num_bad} of {num_lines} lines are bad, more than max_bad_share ({max_share:g}) allows"
        raise DataError(f"{share}: {told}{more}")
