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
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tunesmith.models.fast.kernels import add_copies, run
from tunesmith.models.segments import Segment, Spread, moved, spread_of

_NAME = "tunesmith_segments"
_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_SIZE = 256


@dataclass(frozen=True)
class Rules:
    """How a layer attends, whatever the segments are."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


class Apart:
    """Attention over one row whose segments do not see each other; queries, keys, values are tokens × heads × size.

    On CUDA all segments go through one kernel, made for sequences of any length; elsewhere, and where that kernel
    cannot do what a layer asks for, one segment goes after the other: the slow twin.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: Any,
        spread: Spread | None = None,
        placed: Placed | None = None,
    ) -> None:
        """`spread`, `placed`: the segments in that form, where somebody has made it."""
        self._segments = segments
        self._placed = placed
        if placed is None and device.type == "cuda":
            self._placed = Placed.of(spread or spread_of(segments), device)

    def __call__(self, query: Any, key: Any, value: Any, rules: Rules) -> Any:
        if self._placed is not None and _one_kernel_can(query, rules):
            return self._placed.attend(query, key, value, rules)
        lengths = [segment.length for segment in self._segments]
        # split, not slices: its backward joins the parts, where every slice would add a tensor as long as the row
        parts = (tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value))
        queries, keys, values = parts
        outputs = []
        for number, segment in enumerate(self._segments):
            own_key, own_value = keys[number], values[number]
            if segment.prompt is not None:
                own_key = torch.cat([keys[segment.prompt], own_key], dim=2)
                own_value = torch.cat([values[segment.prompt], own_value], dim=2)
            outputs.append(_attend_one(queries[number], own_key, own_value, rules))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)


@contextlib.contextmanager
def segmented(model: Any, segments: Sequence[Segment], spread: Spread | None = None) -> Iterator[dict[str, Any]]:
    """What to pass to `model(...)` so that it attends within the segments; the model is as before afterwards."""
    with _attending(model.config, _NAME):
        yield {"apart": Apart(segments, next(model.parameters()).device, spread)}


def recompute_layers(model: Any) -> None:
    """From now on, training keeps only the input of each layer and computes the rest again, in the way it was then."""

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), _attending(model.config, model.config._attn_implementation)

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model.enable_input_require_grads()


@contextlib.contextmanager
def _attending(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> tuple[Any, None]:
    """One layer's attention over a row (1 × heads × tokens × size), as transformers calls it."""
    rules = Rules(
        options.get("scaling"), options.get("dropout", 0.0), options.get("sliding_window"), options.get("softcap")
    )
    found = options["apart"](*(tensor[0].transpose(0, 1) for tensor in (query, key, value)), rules)
    return found[None].contiguous(), None


@dataclass(frozen=True)
class Placed:
    """The segments on the device, for one kernel that takes sequences end to end."""

    query_starts: Any
    key_starts: Any
    longest_query: int
    longest_key: int
    gathering: tuple[Any, Any] | None
    """Where the keys lie and where they went (`Spread.key_places`, `Spread.copies`); None if each is used once."""

    @classmethod
    def of(cls, spread: Spread, device: Any) -> Placed:
        gathering = None if spread.is_plain else (moved(spread.key_places, device), moved(spread.copies, device))
        starts = (moved(spread.query_starts, device), moved(spread.key_starts, device))
        return cls(*starts, spread.longest_query, spread.longest_key, gathering)

    def attend(self, query: Any, key: Any, value: Any, rules: Rules) -> Any:
        """Causal here means that the last query of a segment sees its last key, as it must."""
        from torch.nn.attention.varlen import varlen_attn

        key, value = key.to(query.dtype), value.to(query.dtype)
        if self.gathering is not None:
            key, value = (gathered(tensor, *self.gathering) for tensor in (key, value))
        is_grouped = query.shape[1] != key.shape[1]
        return varlen_attn(
            query,
            key,
            value,
            self.query_starts,
            self.key_starts,
            self.longest_query,
            self.longest_key,
            scale=rules.scaling,
            window_size=(-1 if rules.window is None else rules.window - 1, 0),
            **({"enable_gqa": True} if is_grouped and _must_say_grouped() else {}),
        )


def gathered(values: Any, places: Any, copies: Any) -> Any:
    """`values[places]`; its gradient is gathered too, through `copies`, instead of being scattered with atomics."""
    return _Gathered.apply(values, places, copies)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Any, places: Any, copies: Any) -> Any:
        ctx.save_for_backward(copies)
        return values[places]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        (copies,) = ctx.saved_tensors
        return run(add_copies, grads[0], copies), None, None


def _one_kernel_can(query: Any, rules: Rules) -> bool:
    is_plain = rules.softcap is None and not rules.dropout
    return is_plain and query.dtype in _HALF and query.shape[2] % 8 == 0 and query.shape[2] <= _MOST_HEAD_SIZE


@cache
def _must_say_grouped() -> bool:
    """Newer versions of torch want to be told that heads are grouped; older ones see it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_one(query: Any, key: Any, value: Any, rules: Rules) -> Any:
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


def _capped(query: Any, key: Any, value: Any, rules: Rules, visible: Any) -> Any:
    """Attention whose scores are softly limited, as Gemma 2 has it; no fused kernel does that."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (rules.scaling if rules.scaling is not None else query.shape[-1] ** -0.5)
    scores = rules.softcap * torch.tanh(scores / rules.softcap)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, p=rules.dropout) @ value


AttentionInterface.register(_NAME, attend)
