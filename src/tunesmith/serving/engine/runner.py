"""What a batch remembers of its rows between two passes, and the passes themselves.

Three ways, from fast to slow: all rows in one pass over keys and values in slots; each row alone with the memory that
the model makes for itself; each row alone, read from its beginning every time. The last is right for every model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from tunesmith.serving.engine.lora_layers import Sites
from tunesmith.serving.engine.masks import Masks
from tunesmith.serving.engine.slot_cache import Prompts, Slots

Ids = Sequence[int]
Adapters = Sequence[str | None]
Reading = Generator[None, None, Any]
"""Passes over prompts, between which others may have their turn; what it returns are the logits after each prompt."""


class Memory(Protocol):
    """Rows are numbered 0 … n - 1. A pass that fails leaves everything as it was."""

    num_bytes: int

    def join(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> Reading:
        """Read these as new rows behind the others, a pass at a time; returns the logits after each."""

    def step(self, tokens: Ids, adapters: Adapters) -> Any:
        """One more token for every row; returns the logits after each."""

    def leave(self, row: int) -> None:
        """Forget a row; the last one gets its number."""


class SlotMemory:
    """All rows in one pass."""

    def __init__(self, model: Any, sites: Sites, masks: Masks, pass_tokens: int) -> None:
        self._model, self._sites, self._masks, self._pass_tokens = model, sites, masks, pass_tokens
        self._device = next(model.parameters()).device
        self._slots = Slots()

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    def join(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> Reading:
        lengths = torch.tensor([len(text) for text in texts])
        width = int(lengths.max())
        ids = torch.tensor([[*text, *[pad_id] * (width - len(text))] for text in texts]).to(self._device)
        prompts, found = Prompts(width), None
        num = max(1, self._pass_tokens // len(texts))
        for start in range(0, width, num):
            end = min(start + num, width)
            ending = torch.nonzero((lengths > start) & (lengths <= end)).squeeze(1)
            logits, prompts = self._read(ids[:, start:end], prompts, adapters, (start, lengths[ending] - 1))
            found = logits.new_zeros((len(texts), logits.shape[-1])) if found is None else found
            if len(ending):
                found[ending] = logits[ending, (lengths[ending] - 1).unique(return_inverse=True)[1]]
            if end < width:
                yield
        self._slots.join(prompts, lengths.tolist())
        return found

    def _read(self, ids: Any, prompts: Prompts, adapters: Adapters, ends: tuple[int, Any]) -> tuple[Any, Prompts]:
        """One pass over some columns of the prompts; the logits of those columns at which some prompt ends."""
        start, places = ends
        num = ids.shape[1]
        columns = (places - start).unique() if len(places) else torch.tensor([num - 1])
        self._sites.say(adapters)
        # what fills a row up comes after its text, and no token sees those after it: no mask is needed
        output = self._model(
            input_ids=ids,
            position_ids=torch.arange(start, start + num, device=self._device)[None].expand(len(ids), -1),
            past_key_values=prompts,
            use_cache=True,
            logits_to_keep=columns.to(self._device),
        )
        prompts.advance(num)
        return output.logits, prompts

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

    def join(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> Reading:
        rows = [_Lone(list(text)) for text in texts]
        logits = []
        for row, adapter in zip(rows, adapters, strict=True):
            logits.append(self._read(row, adapter))
            yield
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
