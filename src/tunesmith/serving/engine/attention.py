"""Attention for passes that add one token to each row: heads that share keys are asked as if they were tokens.

transformers copies keys and values for each head that shares them as soon as there is a mask; for one token per row the
same follows without a copy, because all heads of a row see the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "tunesmith_slots"
_TORCH = "sdpa"


def attentions(model: Any) -> Iterator[None]:
    """Lets the model attend in each way that it may, fastest first; after the last it attends as before."""
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
    asked = query.view(rows, key.shape[1], groups, size)
    said = scaled_dot_product_attention(
        asked, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"), is_causal=False
    )
    return said.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)
