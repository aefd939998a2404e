"""One decoder layer as three steps: what attention takes, attention, and what follows it.

The first and the last are differentiated by hand, so that only what cannot cheaply be made again is kept: the residual
stream, the projections, the gate. Between layers travel the residual stream and what the last block adds to it: the
sum is made where it is read, together with the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.modeling.attention import Apart, Rules
from tunesmith.modeling.fast.kernels import (
    add_norm,
    add_norm_backward,
    gated,
    gated_backward,
    norm,
    norm_rotate,
    norm_rotate_backward,
    rotate,
    rotate_backward,
    run,
)
from tunesmith.modeling.fast.site import Site


@dataclass(frozen=True)
class Norm:
    """An RMS norm's weight and what keeps it from dividing by zero."""

    weight: Any
    epsilon: float


@dataclass(frozen=True)
class Layer:
    """The parts of a Llama-like decoder layer."""

    first_norm: Norm
    qkv: Site
    query_norm: Norm | None
    key_norm: Norm | None
    out: Site
    second_norm: Norm
    gate_up: Site
    down: Site
    num_heads: int
    num_kv_heads: int
    head_size: int
    scaling: float
    window: int | None

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def __call__(self, residual: Any, delta: Any, cos: Any, sin: Any, attend: Apart) -> tuple[Any, Any]:
        """One layer on; `attend` keeps apart what must not see each other."""
        total, query, key, value = _Before.apply(residual, delta, self, cos, sin)
        attended = attend(query, key, value, Rules(scaling=self.scaling, window=self.window))
        made: tuple[Any, Any] = _After.apply(total, attended.flatten(1), self)
        return made


class _Before(torch.autograd.Function):
    """Residual, norm, queries, keys and values with their positions."""

    @staticmethod
    def forward(ctx: Any, residual: Any, delta: Any, layer: Layer, cos: Any, sin: Any) -> tuple[Any, ...]:
        total, normed = run(add_norm, residual, delta, layer.first_norm.weight, layer.first_norm.epsilon)
        projected, inner = layer.qkv.forward(normed)
        query, key, value = _heads(layer, projected)
        kept = projected
        if layer.query_norm is None or layer.key_norm is None:
            query, key = run(rotate, query, cos, sin), run(rotate, key, cos, sin)
            value, kept = value.clone(), projected.new_empty(0)  # else it would keep all of them
        else:
            query = run(norm_rotate, query, layer.query_norm.weight, layer.query_norm.epsilon, cos, sin)
            key = run(norm_rotate, key, layer.key_norm.weight, layer.key_norm.epsilon, cos, sin)
        ctx.layer = layer
        ctx.save_for_backward(total, inner, kept, cos, sin)
        return total, query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_total, grad_query, grad_key, grad_value = grads
        layer: Layer = ctx.layer
        total, inner, kept, cos, sin = ctx.saved_tensors
        if layer.query_norm is None or layer.key_norm is None:
            grad_query, grad_key = run(rotate_backward, grad_query, cos, sin), run(rotate_backward, grad_key, cos, sin)
        else:
            query, key, _ = _heads(layer, kept)
            of_query, of_key = layer.query_norm, layer.key_norm
            grad_query = run(norm_rotate_backward, grad_query, query, of_query.weight, of_query.epsilon, cos, sin)
            grad_key = run(norm_rotate_backward, grad_key, key, of_key.weight, of_key.epsilon, cos, sin)
        grad_projected = torch.cat([grad_query.flatten(1), grad_key.flatten(1), grad_value.flatten(1)], dim=1)
        normed = run(norm, total, layer.first_norm.weight, layer.first_norm.epsilon)
        grad_normed = layer.qkv.backward(normed, inner, grad_projected)
        grad = run(add_norm_backward, grad_normed, grad_total, total, layer.first_norm.weight, layer.first_norm.epsilon)
        return grad, grad, None, None, None


class _After(torch.autograd.Function):
    """Output projection, residual, norm and the gated products."""

    @staticmethod
    def forward(ctx: Any, residual: Any, attended: Any, layer: Layer) -> tuple[Any, Any]:
        out, out_inner = layer.out.forward(attended)
        total, normed = run(add_norm, residual, out, layer.second_norm.weight, layer.second_norm.epsilon)
        both, both_inner = layer.gate_up.forward(normed)
        product = run(gated, both)
        delta, down_inner = layer.down.forward(product)
        ctx.layer = layer
        ctx.save_for_backward(attended, out_inner, total, both, both_inner, down_inner)
        return total, delta

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_total, grad_delta = grads
        layer: Layer = ctx.layer
        attended, out_inner, total, both, both_inner, down_inner = ctx.saved_tensors
        weight, epsilon = layer.second_norm.weight, layer.second_norm.epsilon
        grad_product, grad_down_inner = layer.down.backward_inputs(grad_delta)
        product, grad_both = run(gated_backward, grad_product, both)
        layer.down.learn(product, down_inner, grad_delta, grad_down_inner)
        normed = run(norm, total, weight, epsilon)
        grad_normed = layer.gate_up.backward(normed, both_inner, grad_both)
        grad_total = run(add_norm_backward, grad_normed, grad_total, total, weight, epsilon)
        grad_attended = layer.out.backward(attended, out_inner, grad_total)
        return grad_total, grad_attended, None


def _heads(layer: Layer, projected: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values, each tokens × heads × size."""
    counts = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    query, key, value = projected.unflatten(1, (sum(counts), layer.head_size)).split(counts, dim=1)
    return query, key, value
