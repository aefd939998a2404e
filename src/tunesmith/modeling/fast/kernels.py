"""What happens between matrix products, each as one function forwards and one backwards, written in plain torch.

On CUDA they are compiled, so that each reads and writes its tensors once; elsewhere they run as they stand. The fast
path and its slow twin are therefore the same lines. Arithmetic is fp32, what is stored has the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.functional import silu


def norm(values: Any, weight: Any, epsilon: float) -> Any:
    """RMS norm over the last dimension, rounded where transformers rounds."""
    wide = values.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(values.dtype)


def add_norm(residual: Any, delta: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """The residual stream with what the last block adds to it, and the norm of that."""
    total = residual + delta
    return total, norm(total, weight, epsilon)


def norm_backward(grad: Any, values: Any, weight: Any, epsilon: float) -> Any:
    """Gradient of the norm's input; fp32."""
    wide = values.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    scaled = wide * inverse
    inner = grad.float() * weight.float()
    return inverse * (inner - scaled * (inner * scaled).mean(-1, keepdim=True))


def add_norm_backward(grad: Any, grad_total: Any, values: Any, weight: Any, epsilon: float) -> Any:
    """Gradient of the residual stream in front of a norm: what comes through the norm, and what went past it."""
    return (norm_backward(grad, values, weight, epsilon) + grad_total.float()).to(values.dtype)


def rotate(values: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions; `values` tokens × heads × size, `cos` and `sin` tokens × size."""
    half = values.shape[-1] // 2
    turned = torch.cat((-values[..., half:], values[..., :half]), dim=-1)
    return values * cos[:, None] + turned * sin[:, None]


def rotate_backward(grad: Any, cos: Any, sin: Any) -> Any:
    half = grad.shape[-1] // 2
    through = grad * sin[:, None]
    return grad * cos[:, None] + torch.cat((through[..., half:], -through[..., :half]), dim=-1)


def norm_rotate(values: Any, weight: Any, epsilon: float, cos: Any, sin: Any) -> Any:
    """Heads normed, as Qwen 3 has it, and rotated."""
    return rotate(norm(values, weight, epsilon), cos, sin)


def norm_rotate_backward(grad: Any, values: Any, weight: Any, epsilon: float, cos: Any, sin: Any) -> Any:
    inner = rotate_backward(grad.float(), cos.float(), sin.float())
    return norm_backward(inner, values, weight, epsilon).to(values.dtype)


def gated(both: Any) -> Any:
    """SwiGLU; `both` holds the gate in its first half and what it gates in the second."""
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


def gated_backward(grad: Any, both: Any) -> tuple[Any, Any]:
    """The product again, which nobody kept, and the gradient of both halves."""
    gate, up = (part.float() for part in both.chunk(2, dim=-1))
    wide = grad.float()
    chance = torch.sigmoid(gate)
    smooth = gate * chance
    grad_gate = wide * up * chance * (1.0 + gate * (1.0 - chance))
    grad_both = torch.cat((grad_gate, wide * smooth), dim=-1)
    return (smooth.to(both.dtype) * up.to(both.dtype)), grad_both.to(both.dtype)


def surprise(logits: Any, tokens: Any) -> tuple[Any, Any]:
    """Of each row the log-probability of its token, and the logarithm of the sum over the vocabulary."""
    wide = logits.float()
    total = wide.logsumexp(-1)
    return wide.gather(1, tokens[:, None])[:, 0] - total, total


def towards(logits: Any, tokens: Any, total: Any) -> Any:
    """How the log-probability grows with each logit: one at the token, less the probabilities."""
    wide = logits.float()
    is_token = torch.arange(logits.shape[1], device=logits.device)[None] == tokens[:, None]
    return (is_token.float() - torch.exp(wide - total[:, None])).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True)
    return compiled


def run(function: Callable[..., Any], first: Any, *more: Any) -> Any:
    """Call one of these functions: compiled on CUDA, as it stands elsewhere."""
    return (_compiled(function) if first.is_cuda else function)(first, *more)
