"""Which way a training computes: fast where that is known to give the same numbers, else as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tunesmith.core.clock import boot_seconds
from tunesmith.models.adapters import trained_parameters
from tunesmith.models.attention import recompute_layers
from tunesmith.models.packs import packed
from tunesmith.models.scoring import ComputeBackend, TransformersBackend, probe_items

if TYPE_CHECKING:
    from tunesmith.models.fast.model import FastModel

_SAME_LOG_PROBS = 2e-2
"""How far sums of log-probabilities may be apart, relative: products are made in bf16 either way."""
_SAME_DIRECTION = 0.95
"""Least cosine between the gradients of both ways, over all that is trained."""


def backend_for(
    adapted: Any, *, checkpointed_layers: int = 0, is_fast: bool = True, log: Callable[[str, str], None] | None = None
) -> ComputeBackend:
    """On CUDA the fast path, if it knows this model and agrees with the slow one when both are asked now."""
    tell = log or (lambda _message, _level: None)
    if not next(adapted.parameters()).is_cuda or not is_fast:
        return _plain(adapted, checkpointed_layers)
    from tunesmith.models.fast.model import FastModel, unsupported_reason

    reason = unsupported_reason(adapted)
    if reason is None:
        began_at = boot_seconds()
        fast = FastModel(adapted, checkpointed_layers=checkpointed_layers)
        try:
            reason = _disagreement(fast, TransformersBackend(adapted))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # a kernel that this device or version does not have
            reason = f"the fast one cannot compute here ({' '.join(str(error).split())[:200]})"
        if reason is None:
            recorded = _recorded(fast)
            tell(
                f"fast path: it agrees with the slow one{recorded}; ready after {boot_seconds() - began_at:.1f} s",
                "info",
            )
            return fast
    tell(f"slow path: {reason}", "info")
    return _plain(adapted, checkpointed_layers)


def _plain(adapted: Any, checkpointed_layers: int) -> TransformersBackend:
    """transformers recomputes all layers or none."""
    if checkpointed_layers:
        recompute_layers(adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted)
    return TransformersBackend(adapted)


def _recorded(fast: FastModel) -> str:
    """What to say about recorded passes; if they differ from computed ones, nothing is recorded any more."""
    if fast.cuda_graphs is None:
        return ""
    found = [_asked(fast) for _ in range(3)]  # computed or recorded, recorded, replayed
    problem = fast.cuda_graphs.problem or next(filter(None, (_difference(found[0], one) for one in found[1:])), None)
    if problem is None:
        return ", and small passes are replayed"
    fast.cuda_graphs = None
    return f", and small passes are not replayed ({problem})"


def _disagreement(fast: ComputeBackend, slow: ComputeBackend) -> str | None:
    """What both make of a small pack with shared prompts: log-probabilities, and gradients of what is trained."""
    found = [_asked(backend) for backend in (slow, fast)]
    slow.start_step()
    return _difference(*found)


def _asked(backend: ComputeBackend) -> tuple[Any, Any]:
    backend.start_step()
    spans = backend.span_log_probs(packed(probe_items(backend.model)))
    torch.tanh(spans / 100).sum().backward()
    gradients = [tensor.grad.float().flatten() for _, tensor in trained_parameters(backend.model)]
    return spans.detach(), torch.cat(gradients)


def _difference(slow: tuple[Any, Any], fast: tuple[Any, Any]) -> str | None:
    (slow_spans, slow_gradients), (fast_spans, fast_gradients) = slow, fast
    if not torch.allclose(slow_spans, fast_spans, rtol=_SAME_LOG_PROBS, atol=1e-2):
        return f"the fast one differs by {float((slow_spans - fast_spans).abs().max()):.3g} in log-probabilities"
    cosine = float(torch.nn.functional.cosine_similarity(slow_gradients, fast_gradients, dim=0))
    if not cosine > _SAME_DIRECTION:
        return f"the gradients of the fast one point elsewhere (cosine {cosine:.3f})"
    return None
