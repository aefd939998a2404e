"""The optimizer's arithmetic: AdamW over what is trained, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch

from tunesmith.models.adapters import trained_parameters
from tunesmith.profiles.profile import Recipe

_FIELDS = ("step", "exp_avg", "exp_avg_sq")


def new_optimizer(adapted: Any, recipe: Recipe) -> Any:
    parameters = [tensor for _, tensor in trained_parameters(adapted)]
    return torch.optim.AdamW(parameters, lr=recipe.peak_lr, weight_decay=recipe.weight_decay, fused=True)


def learning_rate(recipe: Recipe, step: int, num_steps: int) -> float:
    """Of a step counted from 0: rises during the warm-up, then falls by the schedule; never 0 while steps remain."""
    warmup = math.ceil(recipe.warmup * num_steps)
    if step < warmup:
        return recipe.peak_lr * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    match recipe.schedule:
        case "cosine":
            return recipe.peak_lr * 0.5 * (1.0 + math.cos(math.pi * done))
        case "linear":
            return recipe.peak_lr * (1.0 - done)
        case "constant":
            return recipe.peak_lr


def optimizer_tensors(adapted: Any, optimizer: Any) -> dict[str, Any]:
    """The optimizer's memory by parameter name."""
    tensors: dict[str, Any] = {}
    for name, parameter in trained_parameters(adapted):
        for field in _FIELDS if parameter in optimizer.state else ():
            tensors[f"{field}/{name}"] = optimizer.state[parameter][field].detach().cpu().contiguous()
    return tensors


def put_optimizer_tensors(adapted: Any, optimizer: Any, tensors: dict[str, Any]) -> None:
    """Give the optimizer its memory back; a missing tensor is a KeyError."""
    for name, parameter in trained_parameters(adapted):
        memory = {field: tensors[f"{field}/{name}"].to(parameter.device, copy=True) for field in _FIELDS}
        optimizer.state[parameter] = memory
