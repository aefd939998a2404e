"""Decode-step attention: masks over the slot cache, and grouped-query attention without copying keys and values.

transformers repeats keys and values for each query head as soon as there is a mask. For one token per sequence the
query heads of a group can be passed as if they were tokens: all of them see the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "tunesmith_slots"
_TORCH = "sdpa"


def attentions(model: Any) -> Iterator[None]:
    """Set each attention implementation the model can use, fastest first; the last is its own."""
    config = model.config
    before = config._attn_implementation
    if before == _TORCH:
        config._attn_implementation = _NAME
        yield
        config._attn_implementation = before
    yield


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, Any]:
    groups = query.shape[1] // key.shape[1]
    is_step = query.shape[2] == 1 and attention_mask is not None and groups > 1
    if not is_step or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    rows, heads, _, size = query.shape
    grouped = query.view(rows, key.shape[1], groups, size)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"), is_causal=False
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)

FULL, SLIDING = "full_attention", "sliding_attention"


class Masks:
    """Decode-step attention masks: additive or boolean, one for all layers or one per layer type."""

    def __init__(self, model: Any, kinds: frozenset[str], window: int | None, *, is_by_kind: bool) -> None:
        self._kinds, self._window, self._is_by_kind = sorted(kinds), window, is_by_kind
        self._is_added = model.config._attn_implementation == "eager"  # it adds the mask to its scores
        self._dtype = next(model.parameters()).dtype

    @classmethod
    def candidates(cls, model: Any) -> list[Masks]:
        """The masks this model may take, most likely first; empty if a layer type is unknown."""
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

    def of(self, positions: Any, width: int) -> Any:
        """Each sequence sees its tokens up to the new one, at `positions`; a sliding window only the last ones."""
        columns = torch.arange(width, device=positions.device)[None]
        seen = columns <= positions[:, None]
        made = {FULL: seen}
        if self._window is not None:
            made[SLIDING] = seen & (columns > positions[:, None] - self._window)
        masks = {kind: self._form(made[kind])[:, None, None] for kind in self._kinds}
        return masks if self._is_by_kind else masks[self._kinds[0]]

    def _form(self, seen: Any) -> Any:
        if not self._is_added:
            return seen
        hidden = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill(~seen, hidden)
