"""Eviction of adapters: a budget, pins, least recently used first.

An adapter in use is never evicted, nor one used within `min_residency_s`: two versions that are used in turn must not
evict each other each time. A pinned version (live, previous, or about to be live) is evicted only for another pinned
one, and may itself evict unpinned ones at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_BUSY_S = 1.0
"""Retry-After if everything is in use: answers end all the time."""


@dataclass(frozen=True)
class CachedAdapter:
    """An adapter in memory."""

    name: str
    num_users: int
    last_used_s: float
    """When it was last used."""
    is_pinned: bool = False


@dataclass(frozen=True)
class Budget:
    """Limits of the adapters in memory."""

    max_count: int
    min_residency_s: float = 60.0
    """An adapter used within this time is not evicted."""


@dataclass(frozen=True)
class Eviction:
    """The adapters to evict, in this order, so that the wanted one fits."""

    evicted: tuple[str, ...] = ()


@dataclass(frozen=True)
class CannotEvict:
    """The wanted adapter does not fit, and nothing may be evicted now."""

    reason: str
    retry_after_s: float


def plan_eviction(
    cached: Iterable[CachedAdapter], wanted: CachedAdapter, budget: Budget, now_s: float
) -> Eviction | CannotEvict:
    """Decide what to evict so that the wanted adapter fits."""
    others = [one for one in cached if one.name != wanted.name]
    num_to_evict = max(0, len(others) + 1 - budget.max_count)
    by_age = sorted(others, key=lambda one: (one.is_pinned, one.last_used_s, one.name))
    evictable = [one.name for one in by_age if _is_evictable(one, wanted, budget, now_s)]
    if num_to_evict <= len(evictable):
        return Eviction(tuple(evictable[:num_to_evict]))
    return _cannot_evict(others, wanted, budget, now_s)


def _is_evictable(one: CachedAdapter, wanted: CachedAdapter, budget: Budget, now_s: float) -> bool:
    if one.num_users or (one.is_pinned and not wanted.is_pinned):
        return False
    # a version that goes live does not wait for the residency of others
    has_priority = wanted.is_pinned and not one.is_pinned
    return has_priority or now_s - one.last_used_s >= budget.min_residency_s


def _cannot_evict(others: list[CachedAdapter], wanted: CachedAdapter, budget: Budget, now_s: float) -> CannotEvict:
    free = [one for one in others if wanted.is_pinned or not one.is_pinned]
    if not free:
        reason = f"all {len(others)} adapters in memory are live or previous versions; raise serve.max_adapters"
        return CannotEvict(reason, max(_BUSY_S, budget.min_residency_s))
    waits = [max(_BUSY_S, one.last_used_s + budget.min_residency_s - now_s) for one in free]
    limits = "serve.max_adapters, serve.min_residency_s"
    reason = f"the {len(others)} adapters in memory are in use or were used recently ({limits})"
    return CannotEvict(reason, min(waits))
