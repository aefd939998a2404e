"""How much may be under way at one engine, and come with one API key; more is refused with the time to wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from tunesmith.serving.gateway.api_errors import ApiError

_SHARE_OF_NEWS = 0.1
_LONGEST_WAIT_S = 60.0


class Room:
    """Counts the answers under way and waiting; knows from its own pace how long the queue in front of it takes."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.num_rows = 0
        self._row_s: float | None = None  # time from one finished answer to the next while there is work
        self._last_end: float | None = None

    def enter(self, num_rows: int) -> None:
        """Take the places of a request; raises 429 where there are not so many."""
        if self.num_rows + num_rows > self._max_rows:
            raise ApiError(
                429,
                f"{self.num_rows} answers are under way or waiting already; ask again later",
                code="too_many_requests",
                retry_after_s=self.wait_s(num_rows),
            )
        if self.num_rows == 0:
            self._last_end = time.monotonic()
        self.num_rows += num_rows

    def leave(self, num_rows: int) -> None:
        now = time.monotonic()
        if self._last_end is not None:
            took = (now - self._last_end) / num_rows
            self._row_s = took if self._row_s is None else self._row_s + _SHARE_OF_NEWS * (took - self._row_s)
        self._last_end = now
        self.num_rows -= num_rows

    def wait_s(self, num_rows: int = 1) -> float:
        """How long until so many places are free, at the present pace."""
        return min(_LONGEST_WAIT_S, max(1.0, num_rows * (self._row_s or 1.0)))


class Pace:
    """A token bucket for each API key: so many a minute, all at once or spread."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = float(per_minute)
        self._per_s = per_minute / 60
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def enter(self, label: str) -> None:
        """Take one; raises 429 where there is none left. Labels come from the key file, so there are few."""
        now = self._clock()
        left, at = self._left.get(label, (self._most, now))
        left = min(self._most, left + (now - at) * self._per_s)
        if left < 1.0:
            raise ApiError(
                429,
                f"this API key has sent {self._most:g} feedbacks in a minute (serve.max_feedback_per_minute); "
                "send it again later",
                code="too_much",
                retry_after_s=(1.0 - left) / self._per_s,
            )
        self._left[label] = (left - 1.0, now)
