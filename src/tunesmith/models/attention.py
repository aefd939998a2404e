"""Attention for packed sequences: many sequences in one row that cannot attend to each other.

A row consists of consecutive segments. A token attends to the earlier tokens of its segment and, where the segment
continues a shared prompt, to all of that prompt. No mask over the full row is built, so the cost grows with the lengths
of the sequences and not with the length of the row.
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
from tunesmith.models.segments import Segment, VarlenLayout, to_device, varlen_layout

_NAME = "tunesmith_segments"
_HALF = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class AttentionConfig:
    """The attention settings of one layer."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


class SegmentAttention:
    """Attention over one row of segments; queries, keys and values are tokens × heads × size.

    On CUDA one variable-length kernel computes all segments. Elsewhere, and where that kernel does not support a
    layer's settings, the reference implementation computes one segment after the other.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: Any,
        varlen: VarlenLayout | None = None,
        varlen_tensors: VarlenTensors | None = None,
    ) -> None:
        """`varlen`, `varlen_tensors`: the same segments for the kernel, if they were computed before."""
        self._segments = segments
        self._varlen_tensors = varlen_tensors
        if varlen_tensors is None and device.type == "cuda":
            self._varlen_tensors = VarlenTensors.of(varlen or varlen_layout(segments), device)

    def __call__(self, query: Any, key: Any, value: Any, config: AttentionConfig) -> Any:
        if self._varlen_tensors is not None and _is_supported_by_kernel(query, config):
            return self._varlen_tensors.attend(query, key, value, config)
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
            outputs.append(_attend_one(queries[number], own_key, own_value, config))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)


@contextlib.contextmanager
def segmented(model: Any, segments: Sequence[Segment], varlen: VarlenLayout | None = None) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments with which `model(...)` attends within segments; restores the model afterwards."""
    with _attending(model.config, _NAME):
        yield {"segment_attention": SegmentAttention(segments, next(model.parameters()).device, varlen)}


def recompute_layers(model: Any) -> None:
    """Enable activation checkpointing on every layer; the recomputation uses the same attention as the forward pass."""

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
    config = AttentionConfig(
        options.get("scaling"), options.get("dropout", 0.0), options.get("sliding_window"), options.get("softcap")
    )
    output = options["segment_attention"](*(tensor[0].transpose(0, 1) for tensor in (query, key, value)), config)
    return output[None].contiguous(), None


@dataclass(frozen=True)
class VarlenTensors:
    """The arguments of the variable-length attention kernel, on the device."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int
    gathering: tuple[Any, Any] | None
    """`VarlenLayout.key_indices` and `VarlenLayout.copies`; None if each key is used once."""

    @classmethod
    def of(cls, varlen: VarlenLayout, device: Any) -> VarlenTensors:
        gathering = (
            None if varlen.is_plain else (to_device(varlen.key_indices, device), to_device(varlen.copies, device))
        )
        starts = (to_device(varlen.cu_seqlens_q, device), to_device(varlen.cu_seqlens_k, device))
        return cls(*starts, varlen.max_seqlen_q, varlen.max_seqlen_k, gathering)

    def attend(self, query: Any, key: Any, value: Any, config: AttentionConfig) -> Any:
        """Causal here means that the last query of a segment sees its last key, as it must."""
        from torch.nn.attention.varlen import varlen_attn

        key, value = key.to(query.dtype), value.to(query.dtype)
        if self.gathering is not None:
            key, value = (gather(tensor, *self.gathering) for tensor in (key, value))
        is_grouped = query.shape[1] != key.shape[1]
        return varlen_attn(
            query,
            key,
            value,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.max_seqlen_q,
            self.max_seqlen_k,
            scale=config.scaling,
            window_size=(-1 if config.window is None else config.window - 1, 0),
            **({"enable_gqa": True} if is_grouped and _takes_enable_gqa() else {}),
        )


def gather(values: Any, indices: Any, copies: Any) -> Any:
    """Return `values[indices]`; its gradient is gathered through `copies` instead of being scattered with atomics."""
    return _Gather.apply(values, indices, copies)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Any, indices: Any, copies: Any) -> Any:
        ctx.save_for_backward(copies)
        return values[indices]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        (copies,) = ctx.saved_tensors
        return run(add_copies, grads[0], copies), None, None


def _is_supported_by_kernel(query: Any, config: AttentionConfig) -> bool:
    is_plain = config.softcap is None and not config.dropout
    return is_plain and query.dtype in _HALF and query.shape[2] % 8 == 0 and query.shape[2] <= _MAX_HEAD_SIZE


@cache
def _takes_enable_gqa() -> bool:
    """Newer versions of torch require `enable_gqa` for grouped heads; older ones do not have it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_one(query: Any, key: Any, value: Any, config: AttentionConfig) -> Any:
    """Causal attention of the last tokens of a sequence over all of it."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_plain = num_queries == num_keys and (config.window is None or num_keys <= config.window)
    if config.softcap is not None:
        return _capped(query, key, value, config, _visible(num_queries, num_keys, config.window, query.device))
    mask = None if is_plain else _visible(num_queries, num_keys, config.window, query.device)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=config.dropout,
        is_causal=mask is None,
        scale=config.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _visible(num_queries: int, num_keys: int, window: int | None, device: Any) -> Any:
    """Return the mask of keys that each query attends to: up to its own position, and of those the last `window`."""
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = positions - torch.arange(num_keys, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _capped(query: Any, key: Any, value: Any, config: AttentionConfig, visible: Any) -> Any:
    """Attention with soft-capped scores, as in Gemma 2; no fused kernel supports it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (config.scaling if config.scaling is not None else query.shape[-1] ** -0.5)
    scores = config.softcap * torch.tanh(scores / config.softcap)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, p=config.dropout) @ value


AttentionInterface.register(_NAME, attend)
