"""Which adapters stay in an engine's memory: a budget, pins, and who was asked least recently goes first.

What is in use is never let go, nor what was asked for a moment ago: two versions that are asked in turn must not push
each other out each time. A pinned version (live, the one before, or about to be live) makes room only for another
pinned one, and does not wait until the others were left alone for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_BUSY_S = 1.0
"""When to ask again if everything is in use: answers end all the time."""


@dataclass(frozen=True)
class Held:
    """An adapter in memory."""

    name: str
    num_bytes: int
    num_users: int
    asked_s: float
    """When it was last asked for."""
    is_pinned: bool = False


@dataclass(frozen=True)
class Budget:
    """What may be in memory at once."""

    max_count: int
    max_bytes: int | None = None
    min_residency_s: float = 60.0
    """What was asked for within this time stays."""


@dataclass(frozen=True)
class Room:
    """Let these go, in this order, and there is room."""

    let_go: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoRoom:
    """Nothing may be let go now."""

    reason: str
    retry_after_s: float


def make_room(held: Iterable[Held], wanted: Held, budget: Budget, now_s: float) -> Room | NoRoom:
    """What to let go so that the wanted one fits; `wanted.num_bytes` may be an estimate."""
    others = [one for one in held if one.name != wanted.name]
    if budget.max_bytes is not None and wanted.num_bytes > budget.max_bytes:
        return NoRoom(f"{wanted.name} alone is larger than all that adapters may take", budget.min_residency_s)
    count, size = len(others) + 1, sum(one.num_bytes for one in others) + wanted.num_bytes
    let_go: list[str] = []
    for one in sorted(others, key=lambda one: (one.is_pinned, one.asked_s, one.name)):
        if _fits(count, size, budget):
            break
        if _may_go(one, wanted, budget, now_s):
            let_go.append(one.name)
            count, size = count - 1, size - one.num_bytes
    if _fits(count, size, budget):
        return Room(tuple(let_go))
    return _no_room(others, wanted, budget, now_s)


def _fits(count: int, size: int, budget: Budget) -> bool:
    return count <= budget.max_count and (budget.max_bytes is None or size <= budget.max_bytes)


def _may_go(one: Held, wanted: Held, budget: Budget, now_s: float) -> bool:
    if one.num_users or (one.is_pinned and not wanted.is_pinned):
        return False
    is_owed = wanted.is_pinned and not one.is_pinned  # what is to be live waits for nobody who merely asked
    return is_owed or now_s - one.asked_s >= budget.min_residency_s


def _no_room(others: list[Held], wanted: Held, budget: Budget, now_s: float) -> NoRoom:
    free = [one for one in others if wanted.is_pinned or not one.is_pinned]
    if not free:
        reason = f"all {len(others)} adapters in memory are live or the version before; raise serve.max_adapters"
        return NoRoom(reason, max(_BUSY_S, budget.min_residency_s))
    waits = [max(_BUSY_S, one.asked_s + budget.min_residency_s - now_s) for one in free]
    reason = f"the {len(others)} adapters in memory are in use or were asked for a moment ago (serve.max_adapters)"
    return NoRoom(reason, min(waits))
