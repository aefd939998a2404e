"""Counts the bad lines by reason, keeps the first few of each, and decides whether there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.data.conversations import BadRow
from tunesmith.domain.dataset import BadLine, Drops, Reason
from tunesmith.errors import DataError

_KEPT_PER_REASON = 20
_REASONS_SHOWN = 5


class Tally:
    """What could not be used, and why. Holds the first few lines of each reason only, whatever a file holds."""

    def __init__(self, num: dict[Reason, int] | None = None, first: dict[Reason, list[BadLine]] | None = None) -> None:
        self.num = num or {}
        self.first = first or {}

    @property
    def num_bad(self) -> int:
        return sum(self.num.values())

    def add(self, source: int, line: int, bad: BadRow) -> None:
        self.num[bad.reason] = self.num.get(bad.reason, 0) + 1
        kept = self.first.setdefault(bad.reason, [])
        if len(kept) < _KEPT_PER_REASON:
            kept.append(
                BadLine(source=source, line=line, field=bad.field, reason=bad.reason, problem=bad.problem, fix=bad.fix)
            )

    def merge(self, later: Tally) -> None:
        """Add what was found further on."""
        for reason, num in later.num.items():
            self.num[reason] = self.num.get(reason, 0) + num
            kept = self.first.setdefault(reason, [])
            kept += later.first[reason][: _KEPT_PER_REASON - len(kept)]

    def to_json(self) -> dict[str, Any]:
        first = {reason: [bad.model_dump(mode="json") for bad in lines] for reason, lines in self.first.items()}
        return {"num": self.num, "first": first}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        num = {Reason(reason): num for reason, num in values["num"].items()}
        return cls(num, {Reason(key): [BadLine(**bad) for bad in lines] for key, lines in values["first"].items()})

    def drops(self) -> tuple[Drops, ...]:
        """By reason, the most frequent first; equals in the order in which they were met."""
        order = sorted(self.num, key=lambda reason: -self.num[reason])
        return tuple(Drops(reason=reason, num=self.num[reason], first=tuple(self.first[reason])) for reason in order)

    def refuse_too_many(self, num_lines: int, max_share: float, names: Sequence[str]) -> None:
        """Raise when more than the allowed share of the lines is bad, or all of them."""
        if not self.num_bad or (self.num_bad < num_lines and self.num_bad <= max_share * num_lines):
            return
        drops = self.drops()
        told = "; ".join(
            f"{drop.num} × {drop.reason}, first in {names[drop.first[0].source]} {drop.first[0]}"
            for drop in drops[:_REASONS_SHOWN]
        )
        more = f"; {len(drops) - _REASONS_SHOWN} more reasons" if len(drops) > _REASONS_SHOWN else ""
        if self.num_bad == num_lines:
            share = f"all {num_lines} lines are bad" if num_lines > 1 else "the only line is bad"
        else:
            share = f"{self.num_bad} of {num_lines} lines are bad, more than max_bad_share ({max_share:g}) allows"
        raise DataError(f"{share}: {told}{more}")
