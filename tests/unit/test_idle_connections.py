"""Who is hung up on when there are too many connections: the longest idle of the same address first, never the busy."""

from __future__ import annotations

import time

import pytest

from tunesmith.serving.gateway.idle_connections import IdleConnections, origin_of


def test_the_longest_idle_of_the_same_address_makes_room_first() -> None:
    idle_connections: IdleConnections[str] = IdleConnections(10)
    for one, address in (("old", "a"), ("flood", "b"), ("flood2", "b")):
        assert idle_connections.add(one, address) is None
    assert idle_connections.longest_idle("b") == "flood"
    assert idle_connections.longest_idle("c") == "old"
    idle_connections.remove("flood")
    assert idle_connections.longest_idle("b") == "flood2"


def test_the_busy_are_never_named_and_come_back_as_the_youngest() -> None:
    idle_connections: IdleConnections[str] = IdleConnections(10)
    for one in ("first", "second"):
        idle_connections.add(one, "a")
    idle_connections.mark_busy("first")
    assert idle_connections.longest_idle("a") == "second"
    idle_connections.mark_busy("second")
    assert idle_connections.longest_idle("a") is None
    idle_connections.mark_idle("second")
    idle_connections.mark_idle("first")
    assert idle_connections.longest_idle("a") == "second"
    assert idle_connections.mark_idle("second") is None, "who is idle already keeps its place"
    assert idle_connections.longest_idle("a") == "second"
    idle_connections.remove("second")
    idle_connections.remove("first")
    assert (len(idle_connections), idle_connections.longest_idle("a")) == (0, None)
    assert idle_connections.mark_idle("first") is None, "who has left does not come back"
    assert idle_connections.longest_idle("a") is None


def test_one_address_keeps_only_so_many_idle() -> None:
    idle_connections: IdleConnections[int] = IdleConnections(3)
    assert [idle_connections.add(number, "a") for number in range(3)] == [None, None, None]
    assert idle_connections.add(100, "b") is None
    assert idle_connections.add(3, "a") == 0
    idle_connections.remove(0)
    idle_connections.mark_busy(1)
    assert idle_connections.add(4, "a") is None
    assert idle_connections.mark_idle(1) == 2


def test_a_step_takes_no_longer_with_a_hundred_thousand_connections() -> None:
    def took_s(num: int) -> float:
        idle_connections: IdleConnections[int] = IdleConnections(num * 2)
        for number in range(num):
            idle_connections.add(number, str(number % 7))
        begun = time.perf_counter()
        for number in range(num, num + 2000):
            idle_connections.add(number, "3")
            gone = idle_connections.longest_idle("3")
            assert gone is not None
            idle_connections.remove(gone)
        return time.perf_counter() - begun

    few = min(took_s(1000) for _ in range(3))
    assert min(took_s(100_000) for _ in range(3)) < 20 * few  # a hundred times as many


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("10.0.0.7", 5), "10.0.0.7"),
        (("::ffff:10.0.0.7", 5, 0, 0), "10.0.0.7"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_what_counts_as_one_address(peer: object, expected: str) -> None:
    assert origin_of(peer) == expected
