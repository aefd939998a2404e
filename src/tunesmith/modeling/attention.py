"""Attention within segments: many sequences in one row, none of which sees another.

A row is cut into segments, one after the other. The tokens of a segment see those before them in it and, where the
segment continues a shared prompt, all of that prompt; nothing else. No mask over the whole row is ever made, so the
work grows with the lengths of the sequences and not with the length of the row.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_NAME = "tunesmith_segments"


@dataclass(frozen=True)
class Segment:
    """A stretch of a row; `prompt` is the number of an earlier segment that this one continues, or None."""

    length: int
    prompt: int | None = None


@contextlib.contextmanager
def segmented(model: Any, segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    """What to pass to `model(...)` so that it attends within the segments; the model is as before afterwards."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    device = next(model.parameters()).device
    try:
        yield {"segments": tuple(segments), "spread": _spread(segments, device) if device.type == "cuda" else None}
    finally:
        config._attn_implementation = before


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> tuple[Any, None]:
    """One layer's attention over a row (1 × heads × tokens × size), as transformers calls it."""
    segments: Sequence[Segment] = options["segments"]
    spread: _Spread | None = options["spread"]
    rules = _Rules(
        options.get("scaling"), options.get("dropout", 0.0), options.get("sliding_window"), options.get("softcap")
    )
    if spread is not None and rules.softcap is None and query.dtype in (torch.bfloat16, torch.float16):
        return _attend_all(query, key, value, rules, spread), None
    lengths = [segment.length for segment in segments]
    # split, not slices: its backward joins the parts, where every slice would add a tensor as long as the row
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    outputs = []
    for number, segment in enumerate(segments):
        own_key, own_value = keys[number], values[number]
        if segment.prompt is not None:
            own_key = torch.cat([keys[segment.prompt], own_key], dim=2)
            own_value = torch.cat([values[segment.prompt], own_value], dim=2)
        outputs.append(_attend_one(queries[number], own_key, own_value, rules))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Rules:
    """How a layer attends, whatever the segments are."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class _Spread:
    """All segments for one call of a kernel that takes sequences end to end; keys of a prompt precede the answer's."""

    keys: Any
    """Where in the row the keys of each segment lie, segment after segment; a shared prompt is there once for each."""
    query_ends: Any
    key_ends: Any
    longest_query: int
    longest_key: int


def _spread(segments: Sequence[Segment], device: Any) -> _Spread:
    starts = [0, *accumulate(segment.length for segment in segments)]
    places: list[int] = []
    num_keys: list[int] = []
    for number, segment in enumerate(segments):
        before = len(places)
        if segment.prompt is not None:
            places += range(starts[segment.prompt], starts[segment.prompt + 1])
        places += range(starts[number], starts[number + 1])
        num_keys.append(len(places) - before)
    return _Spread(
        keys=torch.tensor(places, device=device),
        query_ends=torch.tensor(starts, device=device, dtype=torch.int32),
        key_ends=torch.tensor([0, *accumulate(num_keys)], device=device, dtype=torch.int32),
        longest_query=max(segment.length for segment in segments),
        longest_key=max(num_keys),
    )


def _attend_all(query: Any, key: Any, value: Any, rules: _Rules, spread: _Spread) -> Any:
    """Every segment in one kernel. Causal here means that the last query sees the last key, as it must."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # tokens × heads × size
    if len(spread.keys) != len(key):
        key, value = key[spread.keys], value[spread.keys]
    output = varlen_attn(
        query,
        key.to(query.dtype),
        value.to(query.dtype),
        spread.query_ends,
        spread.key_ends,
        spread.longest_query,
        spread.longest_key,
        scale=rules.scaling,
        window_size=(-1 if rules.window is None else rules.window - 1, 0),
        **({"enable_gqa": True} if query.shape[1] != key.shape[1] and _must_say_grouped() else {}),
    )
    return output[None]


@cache
def _must_say_grouped() -> bool:
    """Newer versions of torch want to be told that heads are grouped; older ones see it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_one(query: Any, key: Any, value: Any, rules: _Rules) -> Any:
    """Causal attention of the last tokens of a sequence over all of it."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_plain = num_queries == num_keys and (rules.window is None or num_keys <= rules.window)
    if rules.softcap is not None:
        return _capped(query, key, value, rules, _visible(num_queries, num_keys, rules.window, query.device))
    mask = None if is_plain else _visible(num_queries, num_keys, rules.window, query.device)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rules.dropout,
        is_causal=mask is None,
        scale=rules.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _visible(num_queries: int, num_keys: int, window: int | None, device: Any) -> Any:
    """Which keys each query sees: those up to its own place, and of them the last `window`."""
    places = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = places - torch.arange(num_keys, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _capped(query: Any, key: Any, value: Any, rules: _Rules, visible: Any) -> Any:
    """Attention whose scores are softly limited, as Gemma 2 has it; no fused kernel does that."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (rules.scaling if rules.scaling is not None else query.shape[-1] ** -0.5)
    scores = rules.softcap * torch.tanh(scores / rules.softcap)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, p=rules.dropout) @ value


AttentionInterface.register(_NAME, attend)
