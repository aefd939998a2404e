"""LoRA layers: one forward pass for sequences of several adapters, each changed by its own adapter only.

Every module that an adapter changes becomes a LoRA layer. The base weights are applied once for the whole batch. The
low-rank matrices of all adapters are stacked, and a mask keeps for each row only the part of its own adapter. Parts
that cannot be stacked are computed for their rows alone. The adapter mapping is set before each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.models.adapter_weights import AdapterWeights, LowRank, Part

_MAX_IDLE = 4
"""Idle adapters kept in the stacked matrices, beyond one per active adapter."""


@dataclass(frozen=True)
class AdapterRows:
    """The rows of one adapter in a batch; `rows` is None if all rows use it."""

    adapter: str
    rows: Any


class MixedBatchUnsupported(Exception):
    """A module got another first dimension than the batch, so adapters cannot share a pass in this model."""


class LoraLayers:
    """The modules of the model that adapters change, and the loaded adapters."""

    def __init__(self, model: Any) -> None:
        self._model = model
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._layers: dict[str, _LoraLayer] = {}
        self._mapping: Sequence[str | None] = ()
        self._owned: Any = None
        self._masks: dict[tuple[int, ...], Any] = {}
        self.adapter_rows: Sequence[AdapterRows] = ()
        self.stacked: tuple[str, ...] = ()
        """The adapters in the stacked matrices, in this order."""
        self.num_rows = 0
        self.supports_mixed_batch = True

    def add(self, name: str, adapter: AdapterWeights) -> None:
        self.supports_mixed_batch = self.supports_mixed_batch and adapter.has_sequence_dim
        for module_name, part in adapter.parts.items():
            layer = self._layers.get(module_name)
            if layer is None:
                layer = self._layers[module_name] = _LoraLayer(self, self._model.get_submodule(module_name))
            layer.parts[name] = part

    def remove(self, name: str) -> None:
        for layer in self._layers.values():
            layer.parts.pop(name, None)
        self.stacked = tuple(other for other in self.stacked if other != name)
        self._mapping = ()

    def set_adapter_mapping(self, adapters: Sequence[str | None]) -> None:
        """Set which adapter each row of the next passes uses."""
        if adapters == self._mapping:
            return
        self._mapping = list(adapters)
        rows: dict[str, list[int]] = {}
        for number, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(number)
        self.num_rows = len(adapters)
        self.adapter_rows = [
            AdapterRows(name, None if len(numbers) == len(adapters) else torch.tensor(numbers, device=self._device))
            for name, numbers in rows.items()
        ]
        self._masks = {}
        self._stack(rows)

    def mask(self, ranks: tuple[int, ...]) -> Any:
        """By row, ones in the columns of its own adapter in stacked matrices of these ranks, zeros elsewhere."""
        mask = self._masks.get(ranks)
        if mask is None:
            order = {name: number for number, name in enumerate(self.stacked)}
            owners = torch.tensor([-1 if name is None else order[name] for name in self._mapping])
            columns = torch.repeat_interleave(torch.arange(len(ranks)), torch.tensor(ranks))
            mask = self._masks[ranks] = (owners[:, None] == columns[None]).to(self._device, self._dtype)
        return mask

    def _stack(self, wanted: dict[str, list[int]]) -> None:
        if set(wanted) <= set(self.stacked) and len(self.stacked) <= 2 * len(wanted) + _MAX_IDLE:
            return
        kept = [name for name in self.stacked if name not in wanted][: len(wanted) + _MAX_IDLE]
        self.stacked = (*wanted, *kept)


class _LoraLayer:
    """One module of the base model. Its own forward runs first; the changes of the adapters are added to it."""

    def __init__(self, lora_layers: LoraLayers, module: Any) -> None:
        self._lora_layers = lora_layers
        self._base = module.forward
        self.parts: dict[str, Part] = {}
        self._stacked: tuple[str, ...] = ()
        self._ranks: tuple[int, ...] = ()
        self._down: Any = None
        self._up: Any = None
        module.forward = self._forward

    def _forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        changes = [
            (self.parts[group.adapter], group.rows)
            for group in self._lora_layers.adapter_rows
            if group.adapter in self.parts
        ]
        if not changes:
            return self._base(given, *args, **kwargs)
        if changes[0][1] is None:  # all rows use one adapter
            part = changes[0][0]
            return part(given, None if part.replaces else self._base(given, *args, **kwargs))
        if given.shape[0] != self._lora_layers.num_rows:
            raise MixedBatchUnsupported
        output = self._base(given, *args, **kwargs)
        if any(_is_pair(part) for part, _ in changes):
            output = self._add_stacked(given, output)
        for part, rows in changes:
            if not _is_pair(part):
                output = output.index_copy(0, rows, part(given[rows], output[rows]).to(output.dtype))
        return output

    def _add_stacked(self, given: Any, output: Any) -> Any:
        """Add the low-rank changes of all adapters at once; a mask zeroes those of other rows."""
        if self._stacked is not self._lora_layers.stacked:
            self._stack(self._lora_layers.stacked)
        mask = self._lora_layers.mask(self._ranks)
        inner = torch.nn.functional.linear(given.to(self._down.dtype), self._down)
        inner = inner * mask.view(mask.shape[0], *[1] * (inner.ndim - 2), mask.shape[1])
        return output + torch.nn.functional.linear(inner, self._up)

    def _stack(self, names: tuple[str, ...]) -> None:
        pairs = [self.parts.get(name) for name in names]
        stackable = [part for part in pairs if isinstance(part, LowRank) and _is_pair(part)]
        self._down = torch.cat([part.down for part in stackable])
        self._up = torch.cat([part.up for part in stackable], dim=1)
        self._ranks = tuple(part.down.shape[0] if isinstance(part, LowRank) and _is_pair(part) else 0 for part in pairs)
        self._stacked = names


def _is_pair(part: Part) -> bool:
    """Whether the part is a pair of low-rank matrices and nothing else, so that it can be stacked."""
    return isinstance(part, LowRank) and part.bias is None and part.size is None
