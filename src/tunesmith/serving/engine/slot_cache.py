"""The memory of a batch: keys and values of every row in its own slot, so that rows come and go without moving others.

A row's tokens lie at the front of its slot, one after the other; what lies behind them is left over and never seen.
Room is made in steps, and only then is anything copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

_ROOM = 64
"""Slots grow to a multiple of this many tokens."""


class _Layer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None


class Prompts(Cache):  # type: ignore[misc]
    """Takes in what the first passes over whole prompts compute, layer by layer, so many tokens at a time."""

    def __init__(self, width: int) -> None:
        super().__init__(layers=[])
        self._width, self._num_read = width, 0
        self.taken: dict[int, tuple[Any, Any]] = {}

    def advance(self, num: int) -> None:
        """After a pass over so many tokens."""
        self._num_read += num

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if key_states.shape[2] == self._width:  # all at once
            self.taken[layer_idx] = (key_states, value_states)
            return key_states, value_states
        if layer_idx not in self.taken:
            self.taken[layer_idx] = (_wide(key_states, self._width), _wide(value_states, self._width))
        keys, values = self.taken[layer_idx]
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


class Slots(Cache):  # type: ignore[misc]
    """Rows 0 … n - 1 are in use. A pass adds one token to each, at the place behind the row's last."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._layers: dict[int, _Layer] = {}
        self.lengths: list[int] = []
        self._rows: Any = None
        self._places: Any = None
        self._width = 0

    def join(self, prompts: Prompts, lengths: Sequence[int]) -> None:
        """Take rows over from a first pass; all of them or, where memory is out, none."""
        start, num = len(self.lengths), len(lengths)
        self._make_room(prompts, start + num, max(lengths) + 1)
        for index, (keys, values) in prompts.taken.items():
            layer, width = self._layers[index], keys.shape[2]
            layer.keys[start : start + num, :, :width] = keys
            layer.values[start : start + num, :, :width] = values
        self.lengths += lengths

    def leave(self, row: int) -> None:
        """Give a row's slot to the last row."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for layer in self._layers.values():
                layer.keys[row, :, :length] = layer.keys[last, :, :length]
                layer.values[row, :, :length] = layer.values[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        if not self.lengths:
            self._layers.clear()  # nobody is here: give the memory back

    def aim(self, device: Any) -> tuple[Any, int]:
        """Before a pass: room for one more token of each row; returns their places, and how far the longest goes."""
        self._width = max(self.lengths) + 1
        self._make_room(None, len(self.lengths), self._width)
        self._rows = torch.arange(len(self.lengths), device=device)
        self._places = torch.tensor(self.lengths, device=device)
        return self._places, self._width

    def advance(self) -> None:
        """After a pass: the new tokens are there."""
        self.lengths = [length + 1 for length in self.lengths]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        layer, num = self._layers[layer_idx], len(self.lengths)
        layer.keys[self._rows, :, self._places] = key_states[:, :, 0]
        layer.values[self._rows, :, self._places] = value_states[:, :, 0]
        return layer.keys[:num, :, : self._width], layer.values[:num, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._width - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._width, 0

    @property
    def num_bytes(self) -> int:
        held = [tensor for layer in self._layers.values() for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _make_room(self, prompts: Prompts | None, num: int, longest: int) -> None:
        for index, (keys, values) in (prompts.taken if prompts is not None else {}).items():
            if index not in self._layers:
                layer = _Layer()
                layer.keys = keys.new_zeros((0, keys.shape[1], 0, keys.shape[3]))
                layer.values = values.new_zeros((0, values.shape[1], 0, values.shape[3]))
                self._layers[index] = layer
        for layer in self._layers.values():
            layer.keys = _roomier(layer.keys, num, longest, len(self.lengths))
            layer.values = _roomier(layer.values, num, longest, len(self.lengths))


def _roomier(held: Any, num: int, longest: int, in_use: int) -> Any:
    """The same content with room for so many rows of so many tokens; grows by half at least."""
    rows, heads, room, size = held.shape
    if rows >= num and room >= longest:
        return held
    rows = rows if rows >= num else max(num, rows + rows // 2)
    wanted = room if room >= longest else max(longest, room + room // 2)
    wanted = -(-wanted // _ROOM) * _ROOM
    made = held.new_zeros((rows, heads, wanted, size))
    made[:in_use, :, :room] = held[:in_use]
    return made
