"""What waits to be taken in: in its order, and not at all once nobody wants it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from tunesmith.serving.engine.engine_io import Action, MessageQueue, ResponseWriter
from tunesmith.serving.engine.heartbeat import HeartbeatReporter

LONG_S = 10.0


class Slow:
    """Takes a message once it is let; remembers which it took and which were done."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.done: list[str] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.inbox: queue.SimpleQueue[Action] = queue.SimpleQueue()
        ours, self._theirs = socket.socketpair()
        self.messages = MessageQueue(
            self._take, ResponseWriter(ours), self.inbox, HeartbeatReporter(lambda report: None)
        )

    def _take(self, message: Mapping[str, Any]) -> Action:
        self.taken.append(message["id"])
        self.has_begun.set()
        assert self.may_go_on.wait(LONG_S)
        return lambda: self.done.append(message["id"])

    def put(self, *ids: str, op: str = "generate") -> None:
        for message_id in ids:
            self.messages.put({"op": op, "id": message_id})
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
    assert slow.messages.drop("b")
    assert slow.do_until("c") == slow.taken == ["a", "c"]


def test_request_cancelled_while_it_is_read_is_not_computed(slow: Slow) -> None:
    slow.put("a", "b")
    assert slow.messages.drop("a")
    assert slow.do_until("b") == ["b"]
    assert slow.taken == ["a", "b"]


def test_request_that_is_computed_already_cannot_be_dropped(slow: Slow) -> None:
    slow.put("a")
    slow.do_until("a")
    assert not slow.messages.drop("a")


def test_unloading_that_nobody_waits_for_is_done_all_the_same(slow: Slow) -> None:
    slow.put("a", op="unload")
    assert not slow.messages.drop("a")
    assert slow.do_until("a") == ["a"]
