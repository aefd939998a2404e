"""Reference implementation in plain torch of what happens between matrix products, forward and backward.

Every function here has a Triton kernel of the same name in `triton_kernels` that reads and writes each tensor once.
`run` calls that kernel on CUDA where Triton is installed, and the reference implementation everywhere else. Arithmetic
is fp32; results are stored in the model's dtype.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.functional import silu


@dataclass(frozen=True)
class Norm:
    """An RMS norm's weight and what keeps it from dividing by zero."""

    weight: Any
    epsilon: float


@dataclass(frozen=True)
class Heads:
    """How a row of projections is cut into heads: queries, then keys, then values; some models norm the first two."""

    num_queries: int
    num_keys: int
    size: int
    query_norm: Norm | None
    key_norm: Norm | None

    def split(self, projected: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values, each tokens × heads × size; views."""
        counts = [self.num_queries, self.num_keys, self.num_keys]
        query, key, value = projected.unflatten(1, (sum(counts), self.size)).split(counts, dim=1)
        return query, key, value


def norm(values: Any, of: Norm) -> Any:
    """RMS norm over the last dimension, rounded where transformers rounds."""
    wide = values.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + of.epsilon)
    return of.weight * scaled.to(values.dtype)


def add_norm(residual: Any, delta: Any, of: Norm, width: int) -> tuple[Any, Any]:
    """The residual stream with what the last block adds to it, and the norm of that: as the first columns of rows of
    this width, of which the rest is left to whoever asked for them."""
    total = residual + delta
    made = total.new_empty(len(total), width)
    made[:, : total.shape[1]] = norm(total, of)
    return total, made


def norm_backward(grad: Any, past: Any | None, values: Any, of: Norm) -> Any:
    """Gradient of a norm's input: what comes through the norm, and what went past it."""
    wide = values.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + of.epsilon)
    scaled = wide * inverse
    inner = grad.float() * of.weight.float()
    made = inverse * (inner - scaled * (inner * scaled).mean(-1, keepdim=True))
    return (made if past is None else made + past.float()).to(values.dtype)


def apply_rotary(projected: Any, heads: Heads, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    """Return queries and keys with rotary positions (normed first where the model does that), and values.

    Values are a view of `projected` only for normed heads, whose backward pass needs the projections again."""
    query, key, value = heads.split(projected)
    if heads.query_norm is not None and heads.key_norm is not None:
        query, key = norm(query, heads.query_norm), norm(key, heads.key_norm)
    else:
        value = value.clone()
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value


def apply_rotary_backward(query: Any, key: Any, value: Any, projected: Any, heads: Heads, cos: Any, sin: Any) -> Any:
    """Gradient of the projections from those of queries, keys and values; `projected` only matters for normed heads."""
    query, key = (_rotate_backward(grad, cos, sin) for grad in (query, key))
    if heads.query_norm is not None and heads.key_norm is not None:
        old_query, old_key, _ = heads.split(projected)
        query = norm_backward(query, None, old_query, heads.query_norm)
        key = norm_backward(key, None, old_key, heads.key_norm)
    return torch.cat([part.flatten(1) for part in (query, key, value)], dim=1)


def _rotate(values: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions; `values` tokens × heads × size, `cos` and `sin` tokens × size."""
    half = values.shape[-1] // 2
    across = torch.cat((-values[..., half:], values[..., :half]), dim=-1)
    return values * cos[:, None] + across * sin[:, None]


def _rotate_backward(grad: Any, cos: Any, sin: Any) -> Any:
    half = grad.shape[-1] // 2
    across = grad * sin[:, None]
    return grad * cos[:, None] + torch.cat((across[..., half:], -across[..., :half]), dim=-1)


def swiglu(both: Any) -> Any:
    """SwiGLU of `both`, whose first half is the gate projection and whose second half is the up projection."""
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


def swiglu_backward(grad: Any, both: Any) -> tuple[Any, Any]:
    """Return the product (recomputed, not saved) and the gradient of `both`. `grad` may be overwritten."""
    gate, up = (part.float() for part in both.chunk(2, dim=-1))
    chance = torch.sigmoid(gate)
    smooth = gate * chance
    wide = grad.float()
    grad_gate = wide * up * chance * (1.0 + gate * (1.0 - chance))
    grad_both = torch.cat((grad_gate, wide * smooth), dim=-1).to(both.dtype)
    return (smooth * up).to(both.dtype), grad_both


def token_log_probs(logits: Any, tokens: Any, with_grad: bool) -> Any:
    """Log-probability of each row's target token (fp32). With `with_grad`, overwrite logits with the gradient: one-hot
    minus softmax."""
    wide = logits.float()
    total = wide.logsumexp(-1)
    found = wide.gather(1, tokens[:, None])[:, 0] - total
    if with_grad:
        grads = -torch.exp(wide - total[:, None])
        logits.copy_(grads.scatter_add_(1, tokens[:, None], torch.ones_like(found)[:, None]))
    return found


def add_copies(grad: Any, copies: Any) -> Any:
    """For each position of the row, sum the gradients of its copies (`VarlenLayout.copies`)."""
    total = torch.zeros((), device=grad.device)
    for row in copies.unbind(0):
        total = total + torch.where((row >= 0)[:, None, None], grad[row.clamp(min=0)].float(), 0.0)
    return total.to(grad.dtype)


def run(function: Callable[..., Any], first: Any, *more: Any) -> Any:
    """Call one of these functions, or the Triton kernel of the same name on CUDA."""
    return (_triton_kernel(function) if first.is_cuda and has_triton() else function)(first, *more)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _triton_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.triton_kernels"), function.__name__)
    return kernel
