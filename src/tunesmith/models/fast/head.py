"""Log-probabilities of wanted tokens under a frozen output layer, without ever holding all logits.

The gradient of a token's log-probability with respect to its hidden state does not depend on what is made of that
log-probability later, so it is computed at once, while the logits are at hand, and only scaled in the backward pass:
logits are made once, whatever the method.
"""

from __future__ import annotations

from typing import Any

import torch

from tunesmith.models.fast.kernels import run, token_log_probs

ROWS = 4096
"""Tokens whose logits are held at a time."""


def log_probs(hidden: Any, weight: Any, tokens: Any) -> Any:
    """Return the fp32 log-probability of each row's token."""
    return _LogProbs.apply(hidden, weight, tokens)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, tokens: Any) -> Any:
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), ROWS):
            part = slice(start, start + ROWS)
            logits = hidden[part] @ weight.T
            found[part] = run(token_log_probs, logits, tokens[part], grad_hidden is not None)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            del logits  # before the next are made: two of them would be the most that a pass holds
        ctx.save_for_backward(grad_hidden)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return (grad_hidden * grads[0][:, None]).to(grad_hidden.dtype), None, None
