"""Log-probabilities of wanted tokens under a frozen output layer, without ever holding all logits.

The gradient of a token's log-probability with respect to its hidden state does not depend on what is made of that
log-probability later, so it is computed at once, while the logits are at hand, and only scaled in the backward pass:
logits are made once, whatever the method.
"""

from __future__ import annotations

from typing import Any

import torch

from tunesmith.models.fast.kernels import run, surprise

ROWS = 4096
"""Tokens whose logits are held at a time."""


def log_probs(hidden: Any, weight: Any, tokens: Any) -> Any:
    """Of each row of `hidden`, the log-probability of its token; fp32."""
    return _LogProbs.apply(hidden, weight, tokens)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, tokens: Any) -> Any:
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), ROWS):
            part = slice(start, start + ROWS)
            logits = hidden[part] @ weight.T
            found[part] = run(surprise, logits, tokens[part], slopes is not None)
            if slopes is not None:
                torch.mm(logits, weight, out=slopes[part])
            del logits  # before the next are made: two of them would be the most that a pass holds
        ctx.save_for_backward(slopes)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grads[0][:, None]).to(slopes.dtype), None, None
