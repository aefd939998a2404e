"""Rows that are computed together: they join with a first pass over their prompts, and leave when they are done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tunesmith.serving.engine.runner import Memory
from tunesmith.serving.engine.sampling import pick
from tunesmith.serving.engine.sequence_state import Row


class Batch:
    """Each pass writes one token per row; whatever fails leaves the batch as it was before."""

    def __init__(self, memory: Memory, pad_id: int) -> None:
        self._memory, self._pad_id = memory, pad_id
        self.rows: list[Row] = []

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def join(self, rows: Sequence[Row]) -> Iterator[None]:
        """Read the prompts, a pass at a time, and at last write each row's first token."""
        logits = yield from self._memory.join([row.seen for row in rows], [row.adapter for row in rows], self._pad_id)
        self.rows += rows
        self._write(range(len(self.rows) - len(rows), len(self.rows)), logits)

    def step(self) -> None:
        """One more token for every row."""
        logits = self._memory.step([row.last for row in self.rows], [row.adapter for row in self.rows])
        self._write(range(len(self.rows)), logits)

    def remove(self, row: Row) -> None:
        """A row that is no longer wanted."""
        number = next((number for number, one in enumerate(self.rows) if one is row), None)
        if number is not None:
            self._leave(number)

    def _write(self, numbers: range, logits: Any) -> None:
        picked = pick(logits, [self.rows[number].taste for number in numbers])
        over = [number for number, one in zip(numbers, picked, strict=True) if not self.rows[number].take(one)]
        for number in reversed(over):
            self._leave(number)

    def _leave(self, number: int) -> None:
        self._memory.leave(number)
        self.rows[number] = self.rows[-1]
        self.rows.pop()
