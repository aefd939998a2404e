"""The gateway's side of an engine's heartbeat: pings, and how long nothing has come back.

Only time in which the gateway itself was awake counts: after a suspension the engine's words may still be on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunesmith.serving.rules.engine_health import StageHealth, hang_of, worry_of

_PING_S = 1.0
_MIN_PINGS = 5
"""Minimum pings before an engine counts as hung."""
_MAX_INTERVAL_S = 1.0


class Heartbeat:
    """Of one engine process. Until it is ready it cannot answer: then any work of the process is a sign of life."""

    def __init__(self, pid: int, hang_s: float, send_ping: Callable[[int], None]) -> None:
        self._pid, self._hang_s, self._send_ping = pid, hang_s, send_ping
        self._is_ready = False
        self._stages: dict[str, StageHealth] = {}
        self._silent_s = 0.0
        self._looked_s = self._pinged_s = time.monotonic()
        self._num_pings = self._answered = self._seen = 0
        self._work: tuple[int, ...] = ()

    def ready(self) -> None:
        self._is_ready = True
        self._silent_s = 0.0

    def on_report(self, alive: Mapping[str, Any]) -> None:
        """The engine's answer to a ping."""
        self._answered = alive["ping"]
        self._stages = {name: StageHealth(*seconds) for name, seconds in alive["stages"].items()}

    def check(self) -> str | None:
        """Send a ping if one is due; returns why the engine counts as hung, or None."""
        now = time.monotonic()
        passed_s, self._looked_s = min(now - self._looked_s, _MAX_INTERVAL_S), now
        work = _work_of(self._pid)
        has_worked = work != self._work if not self._is_ready else work[1:2] != self._work[1:2]
        has_answered = self._answered > self._seen
        self._silent_s = 0.0 if has_answered or has_worked else self._silent_s + passed_s
        self._seen, self._work = self._answered, work
        if self._is_ready and now - self._pinged_s >= min(_PING_S, self._hang_s / _MIN_PINGS):
            self._pinged_s = now
            self._num_pings += 1
            self._send_ping(self._num_pings)
        return hang_of(self._silent_s, self._stages, self._hang_s)

    @property
    def worry(self) -> str | None:
        return worry_of(self._silent_s, self._stages, self._hang_s)


def _work_of(pid: int) -> tuple[int, ...]:
    """CPU ticks, major page faults and bytes read of a process; empty once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        num_read = int(Path(f"/proc/{pid}/io").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return ()
    return int(fields[11]) + int(fields[12]), int(fields[9]), num_read
