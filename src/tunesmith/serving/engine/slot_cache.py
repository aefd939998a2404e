"""The KV cache of a batch: one slot per sequence, so that sequences are added and removed without moving others.

The tokens of a sequence are at the front of its slot; the rest of the slot is masked. Slots grow in steps, and only
then is anything copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

_SLOT_STEP = 64
"""Slots grow to a multiple of this many tokens."""


class _Layer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None


class PrefillCache(Cache):  # type: ignore[misc]
    """Keys and values of prompts during their prefill, filled chunk by chunk."""

    def __init__(self, width: int) -> None:
        super().__init__(layers=[])
        self._width, self._num_read = width, 0
        self.states: dict[int, tuple[Any, Any]] = {}

    def advance(self, num: int) -> None:
        """Call after a pass over `num` tokens."""
        self._num_read += num

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if key_states.shape[2] == self._width:  # the complete prompt in one pass
            self.states[layer_idx] = (key_states, value_states)
            return key_states, value_states
        if layer_idx not in self.states:
            self.states[layer_idx] = (_wide(key_states, self._width), _wide(value_states, self._width))
        keys, values = self.states[layer_idx]
        end = self._num_read + key_states.shape[2]
        keys[:, :, self._num_read : end] = key_states
        values[:, :, self._num_read : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_read

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._num_read

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_read + query_length, 0


def _wide(part: Any, width: int) -> Any:
    return part.new_empty((part.shape[0], part.shape[1], width, part.shape[3]))


class SlotCache(Cache):  # type: ignore[misc]
    """Slots 0 … n - 1 are in use. A pass appends one token to each."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._layers: dict[int, _Layer] = {}
        self.lengths: list[int] = []
        self._rows: Any = None
        self._positions: Any = None
        self._width = 0

    def append(self, prompts: PrefillCache, lengths: Sequence[int]) -> None:
        """Add the prefilled prompts as new slots; all of them or, if memory runs out, none."""
        start, num = len(self.lengths), len(lengths)
        self._grow(prompts, start + num, max(lengths) + 1)
        for index, (keys, values) in prompts.states.items():
            layer, width = self._layers[index], keys.shape[2]
            layer.keys[start : start + num, :, :width] = keys
            layer.values[start : start + num, :, :width] = values
        self.lengths += lengths

    def free_slot(self, slot: int) -> None:
        """Move the last sequence into a slot."""
        last = len(self.lengths) - 1
        if slot != last:
            length = self.lengths[last]
            for layer in self._layers.values():
                layer.keys[slot, :, :length] = layer.keys[last, :, :length]
                layer.values[slot, :, :length] = layer.values[last, :, :length]
            self.lengths[slot] = length
        self.lengths.pop()
        if not self.lengths:
            self._layers.clear()  # empty: free the memory

    def prepare(self, device: Any) -> tuple[Any, int]:
        """Call before a pass: allocates one more token per slot; returns their positions and the maximum length."""
        self._width = max(self.lengths) + 1
        self._grow(None, len(self.lengths), self._width)
        self._rows = torch.arange(len(self.lengths), device=device)
        self._positions = torch.tensor(self.lengths, device=device)
        return self._positions, self._width

    def advance(self) -> None:
        """Call after a pass: counts the new tokens."""
        self.lengths = [length + 1 for length in self.lengths]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        layer, num = self._layers[layer_idx], len(self.lengths)
        layer.keys[self._rows, :, self._positions] = key_states[:, :, 0]
        layer.values[self._rows, :, self._positions] = value_states[:, :, 0]
        return layer.keys[:num, :, : self._width], layer.values[:num, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._width - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._width, 0

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for layer in self._layers.values() for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _grow(self, prompts: PrefillCache | None, num: int, longest: int) -> None:
        for index, (keys, values) in (prompts.states if prompts is not None else {}).items():
            if index not in self._layers:
                layer = _Layer()
                layer.keys = keys.new_zeros((0, keys.shape[1], 0, keys.shape[3]))
                layer.values = values.new_zeros((0, values.shape[1], 0, values.shape[3]))
                self._layers[index] = layer
        for layer in self._layers.values():
            layer.keys = _grown(layer.keys, num, longest, len(self.lengths))
            layer.values = _grown(layer.values, num, longest, len(self.lengths))


def _grown(tensor: Any, num: int, longest: int, in_use: int) -> Any:
    """The tensor with space for `num` slots of `longest` tokens; grows by at least half."""
    slots, heads, length, size = tensor.shape
    if slots >= num and length >= longest:
        return tensor
    slots = slots if slots >= num else max(num, slots + slots // 2)
    new_length = length if length >= longest else max(longest, length + length // 2)
    new_length = -(-new_length // _SLOT_STEP) * _SLOT_STEP
    grown = tensor.new_zeros((slots, heads, new_length, size))
    grown[:in_use, :, :length] = tensor[:in_use]
    return grown
