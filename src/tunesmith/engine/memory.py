"""What a batch remembers of its rows between two passes, and the passes themselves.

Three ways, from fast to slow: all rows in one pass over keys and values in slots; each row alone with the memory that
the model makes for itself; each row alone, read from its beginning every time. The last is right for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from tunesmith.engine.masks import Masks
from tunesmith.engine.sites import Sites
from tunesmith.engine.slots import Prompts, Slots

Ids = Sequence[int]
Adapters = Sequence[str | None]


class Memory(Protocol):
    """Rows are numbered 0 … n - 1. A pass that fails leaves everything as it was."""

    num_bytes: int

    def join(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> Any:
        """Read these as new rows behind the others; returns the logits after each."""

    def step(self, tokens: Ids, adapters: Adapters) -> Any:
        """One more token for every row; returns the logits after each."""

    def leave(self, row: int) -> None:
        """Forget a row; the last one gets its number."""


class SlotMemory:
    """All rows in one pass."""

    def __init__(self, model: Any, sites: Sites, masks: Masks) -> None:
        self._model, self._sites, self._masks = model, sites, masks
        self._device = next(model.parameters()).device
        self._slots = Slots()

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    def join(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> Any:
        lengths = [len(text) for text in texts]
        width = max(lengths)
        ids = torch.tensor([[*text, *[pad_id] * (width - len(text))] for text in texts])
        columns, places = (torch.tensor(lengths) - 1).unique(return_inverse=True)
        prompts = Prompts()
        self._sites.say(adapters)
        # what fills a row up comes after its text, and no token sees those after it: no mask is needed
        output = self._model(
            input_ids=ids.to(self._device),
            position_ids=torch.arange(width, device=self._device)[None].expand(len(texts), -1),
            past_key_values=prompts,
            use_cache=True,
            logits_to_keep=columns.to(self._device),
        )
        logits = output.logits[torch.arange(len(texts)), places]
        self._slots.join(prompts, lengths)
        return logits

    def step(self, tokens: Ids, adapters: Adapters) -> Any:
        self._sites.say(adapters)
        places, width = self._slots.aim(self._device)
        output = self._model(
            input_ids=torch.tensor(tokens, device=self._device)[:, None],
            position_ids=places[:, None],
            attention_mask=self._masks.of(places, width),
            past_key_values=self._slots,
            use_cache=True,
        )
        self._slots.advance()
        return output.logits[:, -1]

    def leave(self, row: int) -> None:
        self._slots.leave(row)


class LoneMemory:
    """Every row in a pass of its own."""

    num_bytes = 0  # the model's own business

    def __init__(self, model: Any, sites: Sites, *, has_cache: bool) -> None:
        self._model, self._sites, self._has_cache = model, sites, has_cache
        self._device = next(model.parameters()).device
        self._rows: list[_Lone] = []

    def join(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> Any:
        rows = [_Lone(list(text)) for text in texts]
        logits = [self._read(row, adapter) for row, adapter in zip(rows, adapters, strict=True)]
        self._rows += rows
        return torch.cat(logits)

    def step(self, tokens: Ids, adapters: Adapters) -> Any:
        before = [len(row.text) for row in self._rows]
        for row, token in zip(self._rows, tokens, strict=True):
            row.text.append(token)
        try:
            return torch.cat([self._read(row, adapter) for row, adapter in zip(self._rows, adapters, strict=True)])
        except BaseException:
            for row, length in zip(self._rows, before, strict=True):
                row.forget(length)
            raise

    def leave(self, row: int) -> None:
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def _read(self, row: _Lone, adapter: str | None) -> Any:
        self._sites.say([adapter])
        if self._has_cache and row.cache is None:
            row.cache, row.num_read = DynamicCache(config=self._model.config), 0
        ids = torch.tensor([row.text[row.num_read :]], device=self._device)
        if not self._has_cache:
            return self._model(input_ids=ids, use_cache=False).logits[:, -1]
        logits = self._model(input_ids=ids, past_key_values=row.cache, use_cache=True).logits[:, -1]
        row.num_read = len(row.text)
        return logits


class _Lone:
    """A row, and what the model remembers of its first tokens."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.cache: Any = None
        self.num_read = 0

    def forget(self, length: int) -> None:
        """Back to so many tokens; a memory that may have been written to half is made anew."""
        del self.text[length:]
        self.cache, self.num_read = None, 0
