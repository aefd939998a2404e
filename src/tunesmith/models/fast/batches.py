"""A layout as one row, as the fast path computes it: prepared by the host, then on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import pad

from tunesmith.models.attention import Apart, Placed
from tunesmith.models.packs import Layout
from tunesmith.models.segments import Form, Segment, Spread, filled_up, form_of, moved, spread_in


@dataclass(frozen=True)
class Row:
    """What a pass reads, where it is computed."""

    ids: Any
    cos: Any
    sin: Any
    segments: tuple[Segment, ...]
    placed: Placed | None
    """None where one segment goes after the other."""

    @property
    def attend(self) -> Apart:
        return Apart(self.segments, self.ids.device, placed=self.placed)


@dataclass(frozen=True)
class Prepared:
    """A row on the host, filled up to a form if it has one."""

    segments: tuple[Segment, ...]
    ids: Any
    positions: Any
    places: Any
    """Of what predicts each wanted token."""
    form: Form | None
    spread: Spread | None

    def row(self, device: Any, turns: Callable[[Any], tuple[Any, Any]]) -> Row:
        """On the device; `turns` makes cosines and sines of positions."""
        placed = None if self.spread is None else Placed.of(self.spread, device)
        return Row(moved(self.ids, device), *turns(moved(self.positions, device)), self.segments, placed)


def prepared(layout: Layout, choose: Callable[[Form], Form] | None) -> Prepared:
    """`choose`: of a form that a row could have the one it shall have; None leaves it as it is."""
    num_rows, width = layout.ids.shape
    segments = layout.segments or (Segment(width),) * num_rows
    places = layout.columns[layout.picks] if num_rows == 1 else _places(layout)
    ids, positions = layout.ids.flatten(), layout.positions.flatten()
    if choose is None:
        return Prepared(segments, ids, positions, places, None, None)
    form = choose(form_of(segments))
    segments = filled_up(segments, form)
    missing = form.num_tokens - len(ids)
    return Prepared(
        segments, pad(ids, (0, missing)), pad(positions, (0, missing)), places, form, spread_in(segments, form)
    )


def _places(layout: Layout) -> Any:
    """Where in all rows, end to end, the logits of each wanted token are."""
    num_columns = max(1, len(layout.columns))
    return layout.picks // num_columns * layout.ids.shape[1] + layout.columns[layout.picks % num_columns]
