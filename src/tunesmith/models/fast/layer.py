"""One decoder layer as three steps: what attention takes, attention, and what follows it.

The first and the last are differentiated by hand, so that only what cannot cheaply be made again is kept: the residual
stream, the projections, the gate. Between layers travel the residual stream and what the last block adds to it: the
sum is made where it is read, together with the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.models.attention import AttentionConfig, SegmentAttention
from tunesmith.models.fast.kernels import (
    Heads,
    Norm,
    add_norm,
    apply_rotary,
    apply_rotary_backward,
    norm,
    norm_backward,
    run,
    swiglu,
    swiglu_backward,
)
from tunesmith.models.fast.lora_linear import FusedLoraLinear


@dataclass(frozen=True)
class Layer:
    """The parts of a Llama-like decoder layer."""

    first_norm: Norm
    qkv: FusedLoraLinear
    heads: Heads
    out: FusedLoraLinear
    second_norm: Norm
    gate_up: FusedLoraLinear
    down: FusedLoraLinear
    config: AttentionConfig

    @property
    def linears(self) -> tuple[FusedLoraLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def __call__(self, residual: Any, delta: Any, cos: Any, sin: Any, attend: SegmentAttention) -> tuple[Any, Any]:
        """Run the layer; `attend` masks attention between segments."""
        total, query, key, value = _Before.apply(residual, delta, self, cos, sin)
        attended = attend(query, key, value, self.config)
        made: tuple[Any, Any] = _After.apply(total, attended.flatten(1), self)
        return made


class _Before(torch.autograd.Function):
    """Residual, norm, queries, keys and values with their positions."""

    @staticmethod
    def forward(ctx: Any, residual: Any, delta: Any, layer: Layer, cos: Any, sin: Any) -> tuple[Any, ...]:
        total, normed = run(add_norm, residual, delta, layer.first_norm, layer.qkv.input_width)
        projected, inner = layer.qkv.forward(normed)
        query, key, value = run(apply_rotary, projected, layer.heads, cos, sin)
        ctx.layer = layer
        kept = projected if layer.heads.query_norm is not None else None
        ctx.save_for_backward(total, inner, kept, cos, sin)
        return total, query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_total, grad_query, grad_key, grad_value = grads
        layer: Layer = ctx.layer
        total, inner, kept, cos, sin = ctx.saved_tensors
        grad_projected = run(apply_rotary_backward, grad_query, grad_key, grad_value, kept, layer.heads, cos, sin)
        normed = run(norm, total, layer.first_norm)
        grad_normed = layer.qkv.backward(normed, inner, grad_projected)
        grad = run(norm_backward, grad_normed, grad_total, total, layer.first_norm)
        return grad, grad, None, None, None


class _After(torch.autograd.Function):
    """Output projection, residual, norm and the gated products."""

    @staticmethod
    def forward(ctx: Any, residual: Any, attended: Any, layer: Layer) -> tuple[Any, Any]:
        out, out_inner = layer.out.forward(attended)
        total, normed = run(add_norm, residual, out, layer.second_norm, layer.gate_up.input_width)
        both, both_inner = layer.gate_up.forward(normed)
        product = run(swiglu, both)
        delta, down_inner = layer.down.forward(product)
        ctx.layer = layer
        ctx.save_for_backward(attended, out_inner, total, both, both_inner, down_inner)
        return total, delta

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_total, grad_delta = grads
        layer: Layer = ctx.layer
        attended, out_inner, total, both, both_inner, down_inner = ctx.saved_tensors
        grad_product, grad_down_inner = layer.down.backward_inputs(grad_delta)
        product, grad_both = run(swiglu_backward, grad_product, both)
        layer.down.accumulate_grads(product, down_inner, grad_delta, grad_down_inner)
        normed = run(norm, total, layer.second_norm)
        grad_normed = layer.gate_up.backward(normed, both_inner, grad_both)
        grad_total = run(norm_backward, grad_normed, grad_total, total, layer.second_norm)
        grad_attended = layer.out.backward(attended, out_inner, grad_total)
        return grad_total, grad_attended, None
