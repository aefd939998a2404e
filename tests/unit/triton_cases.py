"""Cases of `test_triton_kernels`, which runs them in a process of their own: Triton decides at import how it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tunesmith.models.fast import kernels, triton_kernels
from tunesmith.models.fast.kernels import Heads, Norm
from tunesmith.models.segments import Segment, varlen_layout

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with torch.device("cuda" if HAS_CUDA else "cpu"):
        torch.manual_seed(1)
        yield


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def a_norm(width: int) -> Norm:
    return Norm(torch.randn(width), 1e-6)


@pytest.mark.parametrize("width", [64, 100])
def test_norms_are_those_of_the_plain_functions(width: int) -> None:
    residual, delta, of = torch.randn(5, width), torch.randn(5, width), a_norm(width)
    same(triton_kernels.norm(residual, of), kernels.norm(residual, of))
    same(triton_kernels.add_norm(residual, delta, of, width), kernels.add_norm(residual, delta, of, width))
    wide = torch.randn(5, width + 16)
    grad = wide[:, :width]  # a part of a longer row
    same(triton_kernels.norm_backward(grad, delta, residual, of), kernels.norm_backward(grad, delta, residual, of))
    same(triton_kernels.norm_backward(grad, None, residual, of), kernels.norm_backward(grad, None, residual, of))


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("num_queries", "num_keys", "size"), [(4, 2, 16), (9, 3, 24)])
def test_rotary_positions_forwards_and_backwards(is_normed: bool, num_queries: int, num_keys: int, size: int) -> None:
    norms = (a_norm(size), a_norm(size)) if is_normed else (None, None)
    heads = Heads(num_queries, num_keys, size, *norms)
    projected = torch.randn(6, (num_queries + 2 * num_keys) * size)
    angles = torch.randn(6, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    made = kernels.apply_rotary(projected, heads, cos, sin)
    same(triton_kernels.apply_rotary(projected, heads, cos, sin), made)
    grads = [torch.randn_like(part) for part in made]
    kept = projected if is_normed else None
    same(
        triton_kernels.apply_rotary_backward(*grads, kept, heads, cos, sin),
        kernels.apply_rotary_backward(*grads, kept, heads, cos, sin),
    )


@pytest.mark.parametrize("width", [32, 1500])
def test_swiglu_forwards_and_backwards(width: int) -> None:
    both, grad = torch.randn(3, 2 * width), torch.randn(3, width)
    same(triton_kernels.swiglu(both), kernels.swiglu(both))
    expected = kernels.swiglu_backward(grad.clone(), both)
    same(triton_kernels.swiglu_backward(grad.clone(), both), expected)


@pytest.mark.parametrize("width", [50, 20_000])
def test_log_probabilities_and_their_gradients(width: int) -> None:
    logits, tokens = 5 * torch.randn(4, width), torch.tensor([0, width - 1, 7, 7])
    mine, theirs = logits.clone(), logits.clone()
    same(triton_kernels.token_log_probs(mine, tokens, False), kernels.token_log_probs(theirs, tokens, False))
    assert torch.equal(mine, logits)
    same(triton_kernels.token_log_probs(mine, tokens, True), kernels.token_log_probs(theirs, tokens, True))
    same(mine, theirs)
    same(theirs.sum(1), torch.zeros(4))


def test_copies_are_added_up() -> None:
    varlen = varlen_layout([Segment(3), Segment(2, prompt=0), Segment(1, prompt=0), Segment(4)])
    grad, copies = torch.randn(len(varlen.key_indices), 3, 8), varlen.copies.to("cuda" if HAS_CUDA else "cpu")
    same(triton_kernels.add_copies(grad, copies), kernels.add_copies(grad, copies))


def test_every_kernel_has_a_reference_implementation_of_its_name() -> None:
    named = [
        "norm",
        "add_norm",
        "norm_backward",
        "apply_rotary",
        "apply_rotary_backward",
        "swiglu",
        "swiglu_backward",
        "token_log_probs",
    ]
    assert all(
        callable(getattr(triton_kernels, name)) and callable(getattr(kernels, name)) for name in [*named, "add_copies"]
    )
