"""Where adapters come in: one forward pass for rows of several adapters, each row changed by its own only.

Every module that some adapter changes becomes a site. The base's matrices are read once for all rows; the adapters
add their little on top. Low-rank changes of all adapters are one: their matrices are laid side by side, and each row
keeps only the part that is its own. What cannot be laid side by side is computed for its rows alone. Nothing is ever
switched: what is asked for is said before each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.models.adapter_parts import AdapterParts, LowRank, Part

_LEFT = 4
"""Adapters that nobody asks any more stay laid out while they are no more than those asked, and so many."""


@dataclass(frozen=True)
class Share:
    """The rows of one adapter in a pass; None: all of them."""

    adapter: str
    rows: Any


class RowsLost(Exception):
    """A module was given something else than one row per sequence: adapters cannot share a pass in this model."""


class Sites:
    """The model's modules at which adapters do something, and the adapters that are loaded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._sites: dict[str, _Site] = {}
        self._said: Sequence[str | None] = ()
        self._owned: Any = None
        self._masks: dict[tuple[int, ...], Any] = {}
        self.shares: Sequence[Share] = ()
        self.laid_out: tuple[str, ...] = ()
        """The adapters that are side by side, in this order."""
        self.num_rows = 0
        self.can_mix = True

    def add(self, name: str, adapter: AdapterParts) -> None:
        self.can_mix = self.can_mix and adapter.knows_rows
        for module_name, part in adapter.parts.items():
            site = self._sites.get(module_name)
            if site is None:
                site = self._sites[module_name] = _Site(self, self._model.get_submodule(module_name))
            site.parts[name] = part

    def remove(self, name: str) -> None:
        for site in self._sites.values():
            site.parts.pop(name, None)
        self.laid_out = tuple(one for one in self.laid_out if one != name)
        self._said = ()

    def say(self, adapters: Sequence[str | None]) -> None:
        """Which adapter each row of the next passes belongs to."""
        if adapters == self._said:
            return
        self._said = list(adapters)
        rows: dict[str, list[int]] = {}
        for number, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(number)
        self.num_rows = len(adapters)
        self.shares = [
            Share(name, None if len(places) == len(adapters) else torch.tensor(places, device=self._device))
            for name, places in rows.items()
        ]
        self._masks = {}
        self._lay_out(rows)

    def mask(self, ranks: tuple[int, ...]) -> Any:
        """By row, which columns of matrices side by side, of these ranks, are its own: ones and zeros."""
        made = self._masks.get(ranks)
        if made is None:
            order = {name: number for number, name in enumerate(self.laid_out)}
            owners = torch.tensor([-1 if name is None else order[name] for name in self._said])
            columns = torch.repeat_interleave(torch.arange(len(ranks)), torch.tensor(ranks))
            made = self._masks[ranks] = (owners[:, None] == columns[None]).to(self._device, self._dtype)
        return made

    def _lay_out(self, wanted: dict[str, list[int]]) -> None:
        if set(wanted) <= set(self.laid_out) and len(self.laid_out) <= 2 * len(wanted) + _LEFT:
            return
        kept = [name for name in self.laid_out if name not in wanted][: len(wanted) + _LEFT]
        self.laid_out = (*wanted, *kept)


class _Site:
    """One module of the base. It keeps its own forward, and what adapters do here comes after it."""

    def __init__(self, sites: Sites, module: Any) -> None:
        self._sites = sites
        self._base = module.forward
        self.parts: dict[str, Part] = {}
        self._laid_out: tuple[str, ...] = ()
        self._ranks: tuple[int, ...] = ()
        self._down: Any = None
        self._up: Any = None
        module.forward = self._forward

    def _forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        shares = [
            (self.parts[share.adapter], share.rows) for share in self._sites.shares if share.adapter in self.parts
        ]
        if not shares:
            return self._base(given, *args, **kwargs)
        if shares[0][1] is None:  # all rows are of one adapter
            part = shares[0][0]
            return part(given, None if part.replaces else self._base(given, *args, **kwargs))
        if given.shape[0] != self._sites.num_rows:
            raise RowsLost
        output = self._base(given, *args, **kwargs)
        if any(_is_pair(part) for part, _ in shares):
            output = self._together(given, output)
        for part, rows in shares:
            if not _is_pair(part):
                output = output.index_copy(0, rows, part(given[rows], output[rows]).to(output.dtype))
        return output

    def _together(self, given: Any, output: Any) -> Any:
        """The low-rank changes of all adapters at once: other rows' parts are multiplied by zero."""
        if self._laid_out is not self._sites.laid_out:
            self._lay_out(self._sites.laid_out)
        mask = self._sites.mask(self._ranks)
        inner = torch.nn.functional.linear(given.to(self._down.dtype), self._down)
        inner = inner * mask.view(mask.shape[0], *[1] * (inner.ndim - 2), mask.shape[1])
        return output + torch.nn.functional.linear(inner, self._up)

    def _lay_out(self, names: tuple[str, ...]) -> None:
        pairs = [self.parts.get(name) for name in names]
        held = [part for part in pairs if isinstance(part, LowRank) and _is_pair(part)]
        self._down = torch.cat([part.down for part in held])
        self._up = torch.cat([part.up for part in held], dim=1)
        self._ranks = tuple(part.down.shape[0] if isinstance(part, LowRank) and _is_pair(part) else 0 for part in pairs)
        self._laid_out = names


def _is_pair(part: Part) -> bool:
    """Whether it is two matrices and nothing else."""
    return isinstance(part, LowRank) and part.bias is None and part.size is None
