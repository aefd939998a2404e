"""The engine's heartbeat: reports to each ping which of its threads make progress.

A thread makes progress when it takes the next item. While it works on one item, it makes progress as long as it uses
the CPU or reads pages from disk: a long prefill is not a hang, a thread that waits for a lock is one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.serving.rules.engine_health import StageHealth

_MAX_INTERVAL_S = 2.0
"""Maximum time counted between two checks: a suspended process was not idle meanwhile."""


@dataclass
class _Stage:
    thread_id: int
    num_beats: int = 0
    seen_beats: int = 0
    work: int = 0
    still_s: float = 0.0
    busy_s: float = 0.0


class HeartbeatReporter:
    """Counts the beats of the engine's threads; `send` gets the report that answers a ping."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._stages: dict[str, _Stage] = {}
        self._nudges: list[Callable[[], None]] = []
        self._asked = threading.Event()
        self._ping = 0
        self._checked_s = time.monotonic()

    def register(self, name: str, nudge: Callable[[], None]) -> None:
        """Register the calling thread. `nudge` queues a no-op for it."""
        self._stages[name] = _Stage(name_thread(name))
        self._nudges.append(nudge)

    def beat(self, name: str) -> None:
        """Call from the same thread each time it takes the next item."""
        self._stages[name].num_beats += 1

    def ping(self, number: int) -> None:
        """A ping of the gateway; the heartbeat thread answers it."""
        self._ping = number
        self._asked.set()

    def start(self) -> None:
        threading.Thread(target=self._work, name="heartbeat", daemon=True).start()

    def _work(self) -> None:
        name_thread("heartbeat")
        while True:
            self._asked.wait()
            self._asked.clear()
            number = self._ping
            self._send({"ping": number, "stages": {name: health.as_json() for name, health in self._check().items()}})
            for nudge in self._nudges:
                nudge()

    def _check(self) -> dict[str, StageHealth]:
        now = time.monotonic()
        passed_s, self._checked_s = min(now - self._checked_s, _MAX_INTERVAL_S), now
        return {name: _check_stage(stage, passed_s) for name, stage in list(self._stages.items())}


def _check_stage(stage: _Stage, passed_s: float) -> StageHealth:
    num_beats = stage.num_beats
    work = _work_of(stage.thread_id)
    is_next = num_beats > stage.seen_beats
    stage.busy_s = 0.0 if is_next else stage.busy_s + passed_s
    stage.still_s = 0.0 if is_next or work > stage.work else stage.still_s + passed_s
    stage.seen_beats, stage.work = num_beats, work
    return StageHealth(stage.still_s, stage.busy_s)


def _work_of(thread_id: int) -> int:
    """Ticks of CPU time and major page faults of one of our threads; only whether it grows is of interest."""
    fields = Path(f"/proc/self/task/{thread_id}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[9]) + int(fields[11]) + int(fields[12])


def name_thread(name: str) -> int:
    """Let this thread be found by its name (`top -H`); returns its id. The main thread keeps the program's name."""
    thread_id = threading.get_native_id()
    if threading.current_thread() is not threading.main_thread():
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{thread_id}/comm").write_text(name[:15])
    return thread_id
