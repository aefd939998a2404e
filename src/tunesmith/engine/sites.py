"""Where adapters come in: one forward pass for rows of several adapters, each row changed by its own only.

Every module that some adapter changes becomes a site. The base's matrices are read once for all rows; the adapters
add their little on top, each for its rows. Nothing is switched: what is asked for is said before each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.modeling.adapter_parts import AdapterParts, Part


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
        self._device = next(model.parameters()).device
        self._sites: dict[str, _Site] = {}
        self.shares: Sequence[Share] = ()
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

    def say(self, adapters: Sequence[str | None]) -> None:
        """Which adapter each row of the next passes belongs to."""
        rows: dict[str, list[int]] = {}
        for number, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(number)
        self.num_rows = len(adapters)
        self.shares = [
            Share(name, None if len(places) == len(adapters) else torch.tensor(places, device=self._device))
            for name, places in rows.items()
        ]


class _Site:
    """One module of the base. It keeps its own forward, and what adapters do here comes after it."""

    def __init__(self, sites: Sites, module: Any) -> None:
        self._sites = sites
        self._base = module.forward
        self.parts: dict[str, Part] = {}
        module.forward = self._forward

    def _forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        shares = [
            (self.parts[share.adapter], share.rows) for share in self._sites.shares if share.adapter in self.parts
        ]
        if len(shares) == 1 and shares[0][1] is None and shares[0][0].replaces:
            return shares[0][0](given, None)
        output = self._base(given, *args, **kwargs)
        for part, rows in shares:
            if rows is None:
                output = part(given, output)
                continue
            if given.shape[0] != self._sites.num_rows:
                raise RowsLost
            output = output.index_copy(0, rows, part(given[rows], output[rows]).to(output.dtype))
        return output
