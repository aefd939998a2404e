"""Who is hung up on when there are too many connections: the longest idle of the same address first, never the busy."""

from __future__ import annotations

import time

import pytest

from tunesmith.serving.gateway.idle_connections import Crowd, origin_of


def test_the_longest_idle_of_the_same_address_makes_room_first() -> None:
    crowd: Crowd[str] = Crowd(10)
    for one, address in (("old", "a"), ("flood", "b"), ("flood2", "b")):
        assert crowd.join(one, address) is None
    assert crowd.longest_idle("b") == "flood"
    assert crowd.longest_idle("c") == "old"
    crowd.leave("flood")
    assert crowd.longest_idle("b") == "flood2"


def test_the_busy_are_never_named_and_come_back_as_the_youngest() -> None:
    crowd: Crowd[str] = Crowd(10)
    for one in ("first", "second"):
        crowd.join(one, "a")
    crowd.work("first")
    assert crowd.longest_idle("a") == "second"
    crowd.work("second")
    assert crowd.longest_idle("a") is None
    crowd.rest("second")
    crowd.rest("first")
    assert crowd.longest_idle("a") == "second"
    assert crowd.rest("second") is None, "who is idle already keeps its place"
    assert crowd.longest_idle("a") == "second"
    crowd.leave("second")
    crowd.leave("first")
    assert (len(crowd), crowd.num_idle) == (0, 0)
    assert crowd.rest("first") is None, "who has left does not come back"
    assert crowd.num_idle == 0


def test_one_address_keeps_only_so_many_idle() -> None:
    crowd: Crowd[int] = Crowd(3)
    assert [crowd.join(number, "a") for number in range(3)] == [None, None, None]
    assert crowd.join(100, "b") is None
    assert crowd.join(3, "a") == 0
    crowd.leave(0)
    crowd.work(1)
    assert crowd.join(4, "a") is None
    assert crowd.rest(1) == 2


def test_a_step_takes_no_longer_with_a_hundred_thousand_connections() -> None:
    def took_s(num: int) -> float:
        crowd: Crowd[int] = Crowd(num * 2)
        for number in range(num):
            crowd.join(number, str(number % 7))
        begun = time.perf_counter()
        for number in range(num, num + 2000):
            crowd.join(number, "3")
            gone = crowd.longest_idle("3")
            assert gone is not None
            crowd.leave(gone)
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
