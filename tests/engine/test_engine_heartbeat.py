"""The engine's heartbeat: a thread that computes or takes the next thing is alive, one that only waits is not."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tunesmith.serving.engine.heartbeat import HeartbeatReporter
from tunesmith.serving.rules.engine_health import MAX_STEP_S, StageHealth, hang_of, worry_of


class Pulsed:
    """A pulse with one thread that does what it is given."""

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.heartbeat = HeartbeatReporter(self.reports.put)
        self._has_joined = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()
        assert self._has_joined.wait(5.0)
        self.heartbeat.start()

    def _work(self) -> None:
        self.heartbeat.register("worker", lambda: self.todo.put(lambda: None))
        self._has_joined.set()
        while True:
            do = self.todo.get()
            self.heartbeat.beat("worker")
            do()

    def health_after(self, num: int, pause_s: float = 0.1) -> StageHealth:
        """After so many pings."""
        for number in range(1, num + 1):
            time.sleep(pause_s)
            self.heartbeat.ping(number)
            report = self.reports.get(timeout=5.0)
            assert report["ping"] == number
        return StageHealth(*report["stages"]["worker"])


def test_an_idle_thread_takes_what_it_is_nudged_with() -> None:
    health = Pulsed().health_after(6)
    assert health.still_s < 0.3
    assert health.busy_s < 0.3


def test_a_thread_that_waits_for_a_lock_stands_still() -> None:
    pulsed, lock = Pulsed(), threading.Lock()
    with lock:
        pulsed.todo.put(lambda: lock.__enter__() and None)
        health = pulsed.health_after(8)
    assert health.still_s > 0.5
    assert health.busy_s >= health.still_s


def test_a_thread_that_computes_one_long_thing_is_busy_and_not_still() -> None:
    pulsed, is_over = Pulsed(), threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            pass

    pulsed.todo.put(compute)
    health = pulsed.health_after(8)
    is_over.set()
    assert health.busy_s > 0.5
    assert health.still_s < 0.5


@pytest.mark.parametrize(
    ("silent_s", "still_s", "busy_s", "expected"),
    [
        (0.0, 0.0, 0.0, None),
        (9.0, 9.0, 200.0, None),
        (10.1, 0.0, 0.0, "answered no ping for 10 s"),
        (0.0, 10.1, 10.1, "its thread 'compute' has done nothing for 10 s"),
        (0.0, 0.0, MAX_STEP_S + 1, "busy with one step for 301 s"),
    ],
)
def test_what_counts_as_a_hang(silent_s: float, still_s: float, busy_s: float, expected: str | None) -> None:
    found = hang_of(silent_s, {"messages": StageHealth(0.0, 0.0), "compute": StageHealth(still_s, busy_s)}, 10.0)
    assert (found is None) == (expected is None)
    assert expected is None or expected in str(found)


def test_a_worry_comes_before_the_hang() -> None:
    assert worry_of(1.0, {"compute": StageHealth(0.0, 250.0)}, 10.0) is None
    assert "for 4 s; it is replaced after 10 s" in str(worry_of(4.0, {}, 10.0))
    assert "for 5 s" in str(worry_of(0.0, {"compute": StageHealth(5.0, 5.0)}, 10.0))
