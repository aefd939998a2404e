"""The functions of `kernels` for CUDA: each reads and writes its tensors once, in one launch.

A program works on one token's row. Sums are fp32; what is stored is rounded where the plain functions round.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.models.fast.kernels import Heads, Norm

_ROW_WARPS = 8
_WIDTH = 1024
"""Columns of a gate that one program takes."""
_VOCABULARY = 8192
"""Logits that one program holds at a time."""


def norm(values: Any, of: Norm) -> Any:
    made = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    width = values.shape[-1]
    grid = (values.shape[0],)
    _norm[grid](
        values, values, made, made, of.weight, of.epsilon, values.stride(0), values.stride(0), width, width,
        BLOCK=triton.next_power_of_2(width), ADDS=False, num_warps=_warps(width),
    )  # fmt: skip
    return made


def add_norm(residual: Any, delta: Any, of: Norm, width: int) -> tuple[Any, Any]:
    total, made = torch.empty_like(residual), residual.new_empty(len(residual), width)
    num = residual.shape[-1]
    grid = (residual.shape[0],)
    _norm[grid](
        residual, delta, total, made, of.weight, of.epsilon, residual.stride(0), delta.stride(0), width, num,
        BLOCK=triton.next_power_of_2(num), ADDS=True, num_warps=_warps(num),
    )  # fmt: skip
    return total, made


@triton.jit
def _norm(
    values, delta, total, made, weight, epsilon, values_step, delta_step, made_step, width,
    BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    found = tl.load(values + row * values_step + columns, mask=here, other=0.0)
    if ADDS:
        more = tl.load(delta + row * delta_step + columns, mask=here, other=0.0)
        found = (found.to(tl.float32) + more.to(tl.float32)).to(found.dtype)
        tl.store(total + row * width + columns, found, mask=here)
    wide = found.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    scale = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    rounded = scaled.to(found.dtype).to(tl.float32)
    tl.store(made + row * made_step + columns, (scale * rounded).to(found.dtype), mask=here)


def norm_backward(grad: Any, past: Any | None, values: Any, of: Norm) -> Any:
    made = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    width = values.shape[-1]
    beside = grad if past is None else past
    grid = (values.shape[0],)
    _norm_backward[grid](
        grad, beside, values, made, of.weight, of.epsilon, grad.stride(0), beside.stride(0), values.stride(0), width,
        BLOCK=triton.next_power_of_2(width), ADDS=past is not None, num_warps=_warps(width),
    )  # fmt: skip
    return made


@triton.jit
def _norm_backward(
    grad, past, values, made, weight, epsilon, grad_step, past_step, values_step, width,
    BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    wide = tl.load(values + row * values_step + columns, mask=here, other=0.0).to(tl.float32)
    inner = tl.load(grad + row * grad_step + columns, mask=here, other=0.0).to(tl.float32)
    inner *= tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    scaled = wide * inverse
    found = inverse * (inner - scaled * (tl.sum(inner * scaled, axis=0) / width))
    if ADDS:
        found += tl.load(past + row * past_step + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(made + row * width + columns, found.to(made.dtype.element_ty), mask=here)


def apply_rotary(projected: Any, heads: Heads, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    num, is_normed = len(projected), heads.query_norm is not None
    query = projected.new_empty(num, heads.num_queries, heads.size)
    key = projected.new_empty(num, heads.num_keys, heads.size)
    value = heads.split(projected)[2] if is_normed else torch.empty_like(key)
    query_norm, key_norm = _norms(heads, projected)
    _apply_rotary[(num,)](
        projected, query, key, value, query_norm.weight, key_norm.weight, cos, sin,
        query_norm.epsilon, key_norm.epsilon, projected.stride(0), cos.stride(0),
        HALF=heads.size // 2, QUERIES=heads.num_queries, KEYS=heads.num_keys,
        MAX_QUERIES=triton.next_power_of_2(heads.num_queries), MAX_KEYS=triton.next_power_of_2(heads.num_keys),
        MOST=triton.next_power_of_2(heads.size // 2), IS_NORMED=is_normed, num_warps=4,
    )  # fmt: skip
    return query, key, value


@triton.jit
def _apply_rotary(
    projected, query, key, value, query_weight, key_weight, cos, sin, query_epsilon, key_epsilon, step, rotary_step,
    HALF: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MAX_QUERIES: tl.constexpr, MAX_KEYS: tl.constexpr,
    MOST: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = projected + row * step
    _rotate_heads(
        source, query + row * QUERIES * 2 * HALF, query_weight, query_epsilon, cos + row * rotary_step,
        sin + row * rotary_step, HALF, QUERIES, MAX_QUERIES, MOST, IS_NORMED,
    )  # fmt: skip
    _rotate_heads(
        source + QUERIES * 2 * HALF, key + row * KEYS * 2 * HALF, key_weight, key_epsilon, cos + row * rotary_step,
        sin + row * rotary_step, HALF, KEYS, MAX_KEYS, MOST, IS_NORMED,
    )  # fmt: skip
    if not IS_NORMED:
        _copy_some(source + (QUERIES + KEYS) * 2 * HALF, value + row * KEYS * 2 * HALF, HALF, KEYS, MAX_KEYS, MOST)


@triton.jit
def _rotate_heads(
    source, made, weight, epsilon, cos, sin, HALF: tl.constexpr, HEADS: tl.constexpr, MAX_HEADS: tl.constexpr,
    MOST: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, MOST)[None, :]
    heads = tl.arange(0, MAX_HEADS)[:, None]
    here = (columns < HALF) & (heads < HEADS)
    in_row = columns < HALF
    places = heads * 2 * HALF + columns
    first = tl.load(source + places, mask=here, other=0.0)
    second = tl.load(source + places + HALF, mask=here, other=0.0)
    stored = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if IS_NORMED:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        inverse = tl.rsqrt(mean + epsilon)[:, None]
        first = (first * inverse).to(stored).to(tl.float32)
        second = (second * inverse).to(stored).to(tl.float32)
        first = (first * tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)).to(stored).to(tl.float32)
        second = second * tl.load(weight + columns + HALF, mask=in_row, other=0.0).to(tl.float32)
        second = second.to(stored).to(tl.float32)
    cos_first = tl.load(cos + columns, mask=in_row, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + columns + HALF, mask=in_row, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + columns, mask=in_row, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + columns + HALF, mask=in_row, other=0.0).to(tl.float32)
    tl.store(made + places, (first * cos_first - second * sin_first).to(stored), mask=here)
    tl.store(made + places + HALF, (second * cos_second + first * sin_second).to(stored), mask=here)


@triton.jit
def _copy_some(source, made, HALF: tl.constexpr, HEADS: tl.constexpr, MAX_HEADS: tl.constexpr, MOST: tl.constexpr):
    columns = tl.arange(0, MOST)[None, :]
    heads = tl.arange(0, MAX_HEADS)[:, None]
    here = (columns < HALF) & (heads < HEADS)
    places = heads * 2 * HALF + columns
    tl.store(made + places, tl.load(source + places, mask=here), mask=here)
    tl.store(made + places + HALF, tl.load(source + places + HALF, mask=here), mask=here)


def apply_rotary_backward(query: Any, key: Any, value: Any, projected: Any, heads: Heads, cos: Any, sin: Any) -> Any:
    num, is_normed = len(query), heads.query_norm is not None
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    made = query.new_empty(num, (heads.num_queries + 2 * heads.num_keys) * heads.size)
    query_norm, key_norm = _norms(heads, query)
    _apply_rotary_backward[(num,)](
        query, key, value, projected if is_normed else query, made, query_norm.weight, key_norm.weight, cos, sin,
        query_norm.epsilon, key_norm.epsilon, cos.stride(0),
        HALF=heads.size // 2, QUERIES=heads.num_queries, KEYS=heads.num_keys,
        MAX_QUERIES=triton.next_power_of_2(heads.num_queries), MAX_KEYS=triton.next_power_of_2(heads.num_keys),
        MOST=triton.next_power_of_2(heads.size // 2), IS_NORMED=is_normed, num_warps=4,
    )  # fmt: skip
    return made


@triton.jit
def _apply_rotary_backward(
    query, key, value, projected, made, query_weight, key_weight, cos, sin, query_epsilon, key_epsilon, rotary_step,
    HALF: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MAX_QUERIES: tl.constexpr, MAX_KEYS: tl.constexpr,
    MOST: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = (QUERIES + 2 * KEYS) * 2 * HALF
    target, old = made + row * step, projected + row * step
    _rotate_heads_backward(
        query + row * QUERIES * 2 * HALF, old, target, query_weight, query_epsilon, cos + row * rotary_step,
        sin + row * rotary_step, HALF, QUERIES, MAX_QUERIES, MOST, IS_NORMED,
    )  # fmt: skip
    _rotate_heads_backward(
        key + row * KEYS * 2 * HALF, old + QUERIES * 2 * HALF, target + QUERIES * 2 * HALF, key_weight, key_epsilon,
        cos + row * rotary_step, sin + row * rotary_step, HALF, KEYS, MAX_KEYS, MOST, IS_NORMED,
    )  # fmt: skip
    _copy_some(value + row * KEYS * 2 * HALF, target + (QUERIES + KEYS) * 2 * HALF, HALF, KEYS, MAX_KEYS, MOST)


@triton.jit
def _rotate_heads_backward(
    grad, old, made, weight, epsilon, cos, sin, HALF: tl.constexpr, HEADS: tl.constexpr, MAX_HEADS: tl.constexpr,
    MOST: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, MOST)[None, :]
    heads = tl.arange(0, MAX_HEADS)[:, None]
    here = (columns < HALF) & (heads < HEADS)
    in_row = columns < HALF
    places = heads * 2 * HALF + columns
    from_first = tl.load(grad + places, mask=here, other=0.0)
    stored = from_first.dtype
    from_first = from_first.to(tl.float32)
    from_second = tl.load(grad + places + HALF, mask=here, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + columns, mask=in_row, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + columns + HALF, mask=in_row, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + columns, mask=in_row, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + columns + HALF, mask=in_row, other=0.0).to(tl.float32)
    first = from_first * cos_first + from_second * sin_second
    second = from_second * cos_second - from_first * sin_first
    if IS_NORMED:
        old_first = tl.load(old + places, mask=here, other=0.0).to(tl.float32)
        old_second = tl.load(old + places + HALF, mask=here, other=0.0).to(tl.float32)
        mean = (tl.sum(old_first * old_first, axis=1) + tl.sum(old_second * old_second, axis=1)) / (2 * HALF)
        inverse = tl.rsqrt(mean + epsilon)[:, None]
        first *= tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
        second *= tl.load(weight + columns + HALF, mask=in_row, other=0.0).to(tl.float32)
        old_first, old_second = old_first * inverse, old_second * inverse
        along = (tl.sum(first * old_first, axis=1) + tl.sum(second * old_second, axis=1))[:, None] / (2 * HALF)
        first = inverse * (first - old_first * along)
        second = inverse * (second - old_second * along)
    tl.store(made + places, first.to(stored), mask=here)
    tl.store(made + places + HALF, second.to(stored), mask=here)


def swiglu(both: Any) -> Any:
    num, width = len(both), both.shape[1] // 2
    made = both.new_empty(num, width)
    _swiglu[(num, triton.cdiv(width, _WIDTH))](both, made, width, BLOCK=_WIDTH, num_warps=4)
    return made


@triton.jit
def _swiglu(both, made, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=here, other=0.0)
    up = tl.load(both + row * 2 * width + width + columns, mask=here, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    smooth = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(made + row * width + columns, (smooth * up).to(gate.dtype), mask=here)


def swiglu_backward(grad: Any, both: Any) -> tuple[Any, Any]:
    num, width = len(both), both.shape[1] // 2
    made = torch.empty_like(both)
    grid = (num, triton.cdiv(width, _WIDTH))
    _swiglu_backward[grid](grad, both, made, grad.stride(0), width, BLOCK=_WIDTH, num_warps=4)
    return grad, made


@triton.jit
def _swiglu_backward(grad, both, made, grad_step, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    stored = tl.load(grad + row * grad_step + columns, mask=here, other=0.0)
    wide = stored.to(tl.float32)
    gate = tl.load(both + row * 2 * width + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, mask=here, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    smooth = gate * chance
    of_gate = wide * up * chance * (1.0 + gate * (1.0 - chance))
    tl.store(made + row * 2 * width + columns, of_gate.to(stored.dtype), mask=here)
    tl.store(made + row * 2 * width + width + columns, (wide * smooth).to(stored.dtype), mask=here)
    tl.store(grad + row * grad_step + columns, (smooth * up).to(stored.dtype), mask=here)


def token_log_probs(logits: Any, tokens: Any, with_grad: bool) -> Any:
    found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _token_log_probs[(len(logits),)](
        logits, tokens, found, logits.stride(0), WIDTH=logits.shape[1],
        BLOCK=min(_VOCABULARY, triton.next_power_of_2(logits.shape[1])), WITH_GRAD=with_grad, num_warps=16,
    )  # fmt: skip
    return found


@triton.jit
def _token_log_probs(logits, tokens, found, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WITH_GRAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * step
    token = tl.load(tokens + row)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(own + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(part, axis=0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(part - higher), axis=0)
        largest = higher
    sum_of_all = largest + tl.log(total)
    tl.store(found + row, tl.load(own + token).to(tl.float32) - sum_of_all)
    if WITH_GRAD:
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            here = columns < WIDTH
            part = tl.load(own + columns, mask=here, other=float("-inf")).to(tl.float32)
            grad = tl.where(columns == token, 1.0, 0.0) - tl.exp(part - sum_of_all)
            tl.store(own + columns, grad.to(logits.dtype.element_ty), mask=here)


def add_copies(grad: Any, copies: Any) -> Any:
    num_copies, num = copies.shape
    made = grad.new_empty(num, *grad.shape[1:])
    width = grad.shape[1] * grad.shape[2]
    grad = grad.contiguous()
    _add_copies[(num,)](
        grad, copies, made, num, width, COPIES=num_copies, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return made


@triton.jit
def _add_copies(grad, copies, made, num, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(COPIES):
        place = tl.load(copies + number * num + row)
        found = tl.load(grad + tl.maximum(place, 0) * width + columns, mask=here, other=0.0).to(tl.float32)
        total += tl.where(place >= 0, found, 0.0)
    tl.store(made + row * width + columns, total.to(made.dtype.element_ty), mask=here)


def _norms(heads: Heads, anything: Any) -> tuple[Norm, Norm]:
    """The heads' norms; where there are none, something that is never read."""
    nothing = Norm(anything, 0.0)
    return heads.query_norm or nothing, heads.key_norm or nothing


def _warps(width: int) -> int:
    return _ROW_WARPS if width > 2048 else 4
