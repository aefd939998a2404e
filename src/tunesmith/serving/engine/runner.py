"""Model runners: the prefill and decode passes of a batch, and its KV cache.

From fast to slow: all sequences in one pass over a slot cache; one pass per sequence with the model's own cache; one
pass per sequence over all its tokens, without a cache. The last works with every model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from tunesmith.serving.engine.attention import Masks
from tunesmith.serving.engine.lora_layers import LoraLayers
from tunesmith.serving.engine.slot_cache import PrefillCache, SlotCache

Ids = Sequence[int]
Adapters = Sequence[str | None]
PrefillSteps = Generator[None, None, Any]
"""Prefill passes, between which other sequences may be decoded; returns the logits after each prompt."""


class ModelRunner(Protocol):
    """Runs the passes of one batch. Slots are numbered 0 … n - 1. A pass that fails changes nothing."""

    num_bytes: int

    def prefill(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> PrefillSteps:
        """Add these sequences behind the others, one pass at a time; returns the logits after each."""

    def decode(self, tokens: Ids, adapters: Adapters) -> Any:
        """Append one token to every sequence; returns the logits after each."""

    def free_slot(self, slot: int) -> None:
        """Drop the sequence in a slot; the last sequence moves into it."""


class BatchedRunner:
    """All sequences in one pass, over a slot cache."""

    def __init__(self, model: Any, lora_layers: LoraLayers, masks: Masks, pass_tokens: int) -> None:
        self._model, self._lora_layers, self._masks, self._pass_tokens = model, lora_layers, masks, pass_tokens
        self._device = next(model.parameters()).device
        self._slots = SlotCache()

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    def prefill(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> PrefillSteps:
        lengths = torch.tensor([len(text) for text in texts])
        width = int(lengths.max())
        ids = torch.tensor([[*text, *[pad_id] * (width - len(text))] for text in texts]).to(self._device)
        cache, last_logits = PrefillCache(width), None
        num = max(1, self._pass_tokens // len(texts))
        for start in range(0, width, num):
            end = min(start + num, width)
            ending = torch.nonzero((lengths > start) & (lengths <= end)).squeeze(1)
            logits = self._prefill_columns(ids[:, start:end], cache, adapters, (start, lengths[ending] - 1))
            if last_logits is None:
                last_logits = logits.new_zeros((len(texts), logits.shape[-1]))
            if len(ending):
                last_logits[ending] = logits[ending, (lengths[ending] - 1).unique(return_inverse=True)[1]]
            if end < width:
                yield
        self._slots.append(cache, lengths.tolist())
        return last_logits

    def _prefill_columns(self, ids: Any, cache: PrefillCache, adapters: Adapters, ends: tuple[int, Any]) -> Any:
        """One pass over some columns of the prompts; returns the logits of the columns at which a prompt ends."""
        start, last_positions = ends
        num = ids.shape[1]
        columns = (last_positions - start).unique() if len(last_positions) else torch.tensor([num - 1])
        self._lora_layers.set_adapter_mapping(adapters)
        # padding comes after the prompt, and attention is causal: no mask is needed
        output = self._model(
            input_ids=ids,
            position_ids=torch.arange(start, start + num, device=self._device)[None].expand(len(ids), -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=columns.to(self._device),
        )
        cache.advance(num)
        return output.logits

    def decode(self, tokens: Ids, adapters: Adapters) -> Any:
        self._lora_layers.set_adapter_mapping(adapters)
        positions, width = self._slots.prepare(self._device)
        output = self._model(
            input_ids=torch.tensor(tokens, device=self._device)[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks.of(positions, width),
            past_key_values=self._slots,
            use_cache=True,
        )
        self._slots.advance()
        return output.logits[:, -1]

    def free_slot(self, slot: int) -> None:
        self._slots.free_slot(slot)


class SequentialRunner:
    """One pass per sequence."""

    num_bytes = 0  # the model allocates its own cache

    def __init__(self, model: Any, lora_layers: LoraLayers, *, has_cache: bool) -> None:
        self._model, self._lora_layers, self._has_cache = model, lora_layers, has_cache
        self._device = next(model.parameters()).device
        self._sequences: list[_CachedSequence] = []

    def prefill(self, texts: Sequence[Ids], adapters: Adapters, pad_id: int) -> PrefillSteps:
        sequences = [_CachedSequence(list(text)) for text in texts]
        logits = []
        for sequence, adapter in zip(sequences, adapters, strict=True):
            logits.append(self._forward(sequence, adapter))
            yield
        self._sequences += sequences
        return torch.cat(logits)

    def decode(self, tokens: Ids, adapters: Adapters) -> Any:
        before = [len(sequence.ids) for sequence in self._sequences]
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.ids.append(token)
        try:
            pairs = zip(self._sequences, adapters, strict=True)
            return torch.cat([self._forward(sequence, adapter) for sequence, adapter in pairs])
        except BaseException:
            for sequence, length in zip(self._sequences, before, strict=True):
                sequence.truncate(length)
            raise

    def free_slot(self, slot: int) -> None:
        self._sequences[slot] = self._sequences[-1]
        self._sequences.pop()

    def _forward(self, sequence: _CachedSequence, adapter: str | None) -> Any:
        self._lora_layers.set_adapter_mapping([adapter])
        if self._has_cache and sequence.cache is None:
            sequence.cache, sequence.num_cached = DynamicCache(config=self._model.config), 0
        ids = torch.tensor([sequence.ids[sequence.num_cached :]], device=self._device)
        if not self._has_cache:
            return self._model(input_ids=ids, use_cache=False).logits[:, -1]
        logits = self._model(input_ids=ids, past_key_values=sequence.cache, use_cache=True).logits[:, -1]
        sequence.num_cached = len(sequence.ids)
        return logits


class _CachedSequence:
    """The tokens of a sequence, and the model's cache for the first `num_cached` of them."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.cache: Any = None
        self.num_cached = 0

    def truncate(self, length: int) -> None:
        """Back to `length` tokens; the cache may be partly written, so it is dropped."""
        del self.ids[length:]
        self.cache, self.num_cached = None, 0
