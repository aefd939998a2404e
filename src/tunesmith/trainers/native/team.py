"""The processes that make a step together: each takes its share of the passes, gradients are summed, all update alike.

Weights never travel: every process makes the same update from the same summed gradients, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Team:
    """One process of `size`; alone, everything here is the identity."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def share(self, parts: Sequence[T]) -> list[T]:
        """This process's part of the work; large parts come first, so that dealing them out in turn is even."""
        return list(parts[self.rank :: self.size])

    def total(self, value: float) -> float:
        return self.totals({"": value})[""]

    def totals(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over all processes; one that had nothing to do has fewer names."""
        if self.size == 1:
            return values
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, values)
        names = sorted({name for part in gathered for name in part})
        return {name: sum(part.get(name, 0.0) for part in gathered) for name in names}

    def joined(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What any process found, in the order of the processes."""
        if self.size == 1:
            return names
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, names)
        return tuple(name for part in gathered for name in part)

    def sum_gradients(self, parameters: Sequence[Any]) -> None:
        """One message for all gradients; a parameter that this process did not reach counts as zero."""
        if self.size == 1:
            return
        for tensor in parameters:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        flat = torch.cat([tensor.grad.reshape(-1) for tensor in parameters])
        dist.all_reduce(flat)
        for tensor, summed in zip(parameters, flat.split([tensor.numel() for tensor in parameters]), strict=True):
            tensor.grad.copy_(summed.view_as(tensor))
