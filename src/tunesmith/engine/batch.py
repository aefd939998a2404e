"""Rows that are computed together: they join with a first pass over their prompts, and leave when they are done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tunesmith.engine.rows import Row
from tunesmith.engine.sampling import pick
from tunesmith.engine.sites import Sites
from tunesmith.engine.slots import Prompts, Slots


class Batch:
    """Each pass writes one token per row; whatever fails leaves the batch as it was before."""

    def __init__(self, model: Any, sites: Sites, pad_id: int) -> None:
        self._model, self._sites, self._pad_id = model, sites, pad_id
        self._device = next(model.parameters()).device
        self._slots = Slots()
        self.rows: list[Row] = []

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    def join(self, rows: Sequence[Row]) -> None:
        """Read the prompts in one pass, and write each row's first token."""
        lengths = [len(row.seen) for row in rows]
        width = max(lengths)
        ids = torch.tensor([[*row.seen, *[self._pad_id] * (width - len(row.seen))] for row in rows])
        ends = torch.tensor(lengths) - 1
        columns, places = ends.unique(return_inverse=True)
        prompts = Prompts()
        self._sites.say([row.adapter for row in rows])
        # what fills a row up comes after its prompt, and no token sees those after it: no mask is needed
        output = self._model(
            input_ids=ids.to(self._device),
            position_ids=torch.arange(width, device=self._device)[None].expand(len(rows), -1),
            past_key_values=prompts,
            use_cache=True,
            logits_to_keep=columns.to(self._device),
        )
        logits = output.logits[torch.arange(len(rows)), places]
        self._slots.join(prompts, lengths)
        self.rows += rows
        self._write(range(len(self.rows) - len(rows), len(self.rows)), logits)

    def step(self) -> None:
        """One more token for every row."""
        self._sites.say([row.adapter for row in self.rows])
        places, seen = self._slots.aim(self._device)
        output = self._model(
            input_ids=torch.tensor([[row.last] for row in self.rows], device=self._device),
            position_ids=places,
            attention_mask=seen,
            past_key_values=self._slots,
            use_cache=True,
        )
        self._slots.advance()
        self._write(range(len(self.rows)), output.logits[:, -1])

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
        last = self._slots.leave(number)
        self.rows[number] = self.rows[last]
        self.rows.pop()
