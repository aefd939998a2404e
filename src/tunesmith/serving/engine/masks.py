"""Who may look at what in a pass that adds one token to each row of its slots."""

from __future__ import annotations

from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


class Masks:
    """As the model's attention wants them: of numbers or of truths, one for all layers or one per kind of layer."""

    def __init__(self, model: Any, kinds: frozenset[str], window: int | None, *, is_by_kind: bool) -> None:
        self._kinds, self._window, self._is_by_kind = sorted(kinds), window, is_by_kind
        self._is_added = model.config._attn_implementation == "eager"  # it adds the mask to its scores
        self._dtype = next(model.parameters()).dtype

    @classmethod
    def candidates(cls, model: Any) -> list[Masks]:
        """What this model may take, likeliest first; none where some layer does not attend as we know it."""
        config = model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        kinds = frozenset(getattr(config, "layer_types", None) or ([FULL] if window is None else [SLIDING]))
        if not kinds <= {FULL, SLIDING} or (SLIDING in kinds and window is None):
            return []
        if len(kinds) > 1:
            return [cls(model, kinds, window, is_by_kind=True)]
        return [cls(model, kinds, window, is_by_kind=by_kind) for by_kind in (False, True)]

    def of(self, places: Any, width: int) -> Any:
        """Each row sees its tokens up to the new one, whose place is given; a sliding window only its last ones."""
        columns = torch.arange(width, device=places.device)[None]
        seen = columns <= places[:, None]
        made = {FULL: seen}
        if self._window is not None:
            made[SLIDING] = seen & (columns > places[:, None] - self._window)
        masks = {kind: self._form(made[kind])[:, None, None] for kind in self._kinds}
        return masks if self._is_by_kind else masks[self._kinds[0]]

    def _form(self, seen: Any) -> Any:
        if not self._is_added:
            return seen
        hidden = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill(~seen, hidden)
