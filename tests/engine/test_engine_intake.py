"""What waits to be taken in: in its order, and not at all once nobody wants it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from tunesmith.serving.engine.engine_io import Do, Intake, Outbox
from tunesmith.serving.engine.heartbeat import Pulse

LONG_S = 10.0


class Slow:
    """Takes a message once it is let; remembers which it took and which were done."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.done: list[str] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.inbox: queue.SimpleQueue[Do] = queue.SimpleQueue()
        ours, self._theirs = socket.socketpair()
        self.intake = Intake(self._take, Outbox(ours), self.inbox, Pulse(lambda report: None))

    def _take(self, message: Mapping[str, Any]) -> Do:
        self.taken.append(message["id"])
        self.has_begun.set()
        assert self.may_go_on.wait(LONG_S)
        return lambda: self.done.append(message["id"])

    def put(self, *ids: str, do: str = "generate") -> None:
        for message_id in ids:
            self.intake.put({"do": do, "id": message_id})
        assert self.has_begun.wait(LONG_S)

    def do_until(self, last: str) -> list[str]:
        self.may_go_on.set()
        while last not in self.done:
            self.inbox.get(timeout=LONG_S)()
        return self.done


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_request_cancelled_before_its_turn_is_never_read(slow: Slow) -> None:
    slow.put("a", "b", "c")
    assert slow.intake.drop("b")
    assert slow.do_until("c") == slow.taken == ["a", "c"]


def test_request_cancelled_while_it_is_read_is_not_computed(slow: Slow) -> None:
    slow.put("a", "b")
    assert slow.intake.drop("a")
    assert slow.do_until("b") == ["b"]
    assert slow.taken == ["a", "b"]


def test_request_that_is_computed_already_is_not_the_desks_to_drop(slow: Slow) -> None:
    slow.put("a")
    slow.do_until("a")
    assert not slow.intake.drop("a")


def test_unloading_that_nobody_waits_for_is_done_all_the_same(slow: Slow) -> None:
    slow.put("a", do="unload")
    assert not slow.intake.drop("a")
    assert slow.do_until("a") == ["a"]
