"""Which adapter is let go for another: never one in use, none that was asked a moment ago, the longest idle first."""

from __future__ import annotations

from typing import Any

from tunesmith.serving.rules.eviction import Budget, CachedAdapter, CannotEvict, Eviction, plan_eviction

NOW = 1000.0


def held(name: str, idle_s: float = 100.0, **changes: Any) -> CachedAdapter:
    fields: dict[str, Any] = {"num_users": 0}
    return CachedAdapter(name, last_used_s=NOW - idle_s, **(fields | changes))


def decide(*others: CachedAdapter, wanted: CachedAdapter | None = None, **budget: Any) -> Eviction | CannotEvict:
    fields: dict[str, Any] = {"max_count": 3, "min_residency_s": 60.0}
    return plan_eviction(others, wanted or held("new", 0.0), Budget(**(fields | budget)), NOW)


def test_nothing_is_let_go_while_there_is_room() -> None:
    assert decide(held("a"), held("b")) == Eviction()


def test_one_that_is_held_already_needs_no_room() -> None:
    assert decide(held("a"), held("b"), held("new")) == Eviction()


def test_least_recently_asked_goes_first() -> None:
    assert decide(held("a", 70), held("b", 90), held("c", 80)) == Eviction(("b",))


def test_in_use_is_never_let_go() -> None:
    assert decide(held("a", 900, num_users=1), held("b", 61), held("c", 70)) == Eviction(("c",))
    refused = decide(*(held(name, 900, num_users=2) for name in "abc"))
    assert isinstance(refused, CannotEvict)
    assert refused.retry_after_s == 1.0


def test_asked_a_moment_ago_stays_and_says_when_to_come_back() -> None:
    refused = decide(held("a", 10), held("b", 20), held("c", 50))
    assert isinstance(refused, CannotEvict)
    assert refused.retry_after_s == 10.0
    assert decide(held("a", 10), held("b", 20), held("c", 60)) == Eviction(("c",))
    assert decide(held("a", 1), held("b", 2), held("c", 3), min_residency_s=0.0) == Eviction(("c",))


def test_pinned_goes_only_for_another_pinned() -> None:
    pinned = [held(name, idle_s, is_pinned=True) for name, idle_s in (("a", 900), ("b", 800), ("c", 700))]
    refused = decide(*pinned)
    assert isinstance(refused, CannotEvict)
    assert "serve.max_adapters" in refused.reason
    assert decide(*pinned, wanted=held("new", 0.0, is_pinned=True)) == Eviction(("a",))
    assert decide(*pinned[:2], held("d", 61), wanted=held("new", 0.0, is_pinned=True)) == Eviction(("d",))


def test_what_goes_live_gets_in_for_one_that_was_asked_a_moment_ago() -> None:
    others = (held("a", 2, is_pinned=True), held("b", 1), held("c", 3, num_users=1))
    assert isinstance(decide(*others), CannotEvict)
    assert decide(*others, wanted=held("new", 0.0, is_pinned=True)) == Eviction(("b",))


def test_several_go_at_once_where_the_limit_was_lowered() -> None:
    others = [held(name, idle_s) for name, idle_s in (("a", 70), ("b", 90), ("c", 80))]
    assert decide(*others, max_count=2) == Eviction(("b", "c"))
    assert isinstance(decide(*others[:2], held("c", 10), max_count=1), CannotEvict)
