"""Admission control per engine and rate limits per API key; both refuse with 429 and Retry-After."""

from __future__ import annotations

import time
from collections.abc import Callable

from tunesmith.serving.gateway.api_errors import ApiError

_SMOOTHING = 0.1
_MAX_WAIT_S = 60.0


class AdmissionControl:
    """Limits the running and queued answers of one engine; estimates the wait from its recent throughput."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.num_rows = 0
        self._row_s: float | None = None  # time from one finished answer to the next while there is work
        self._last_end: float | None = None

    def acquire(self, num_rows: int) -> None:
        """Reserve capacity for a request; raises 429 if there is not enough."""
        if self.num_rows + num_rows > self._max_rows:
            raise ApiError(
                429,
                f"engine at capacity: {self.num_rows} answers running or queued; retry after the time in Retry-After",
                code="too_many_requests",
                retry_after_s=self.wait_s(num_rows),
            )
        if self.num_rows == 0:
            self._last_end = time.monotonic()
        self.num_rows += num_rows

    def release(self, num_rows: int) -> None:
        now = time.monotonic()
        if self._last_end is not None:
            took = (now - self._last_end) / num_rows
            self._row_s = took if self._row_s is None else self._row_s + _SMOOTHING * (took - self._row_s)
        self._last_end = now
        self.num_rows -= num_rows

    def wait_s(self, num_rows: int = 1) -> float:
        """Estimated seconds until `num_rows` answers have ended."""
        return min(_MAX_WAIT_S, max(1.0, num_rows * (self._row_s or 1.0)))


class RateLimiter:
    """A token bucket per API key: `per_minute` requests, in bursts or spread."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = float(per_minute)
        self._per_s = per_minute / 60
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def acquire(self, label: str) -> None:
        """Take a token; raises 429 if none is left. Labels come from the key file, so there are few."""
        now = self._clock()
        left, at = self._left.get(label, (self._most, now))
        left = min(self._most, left + (now - at) * self._per_s)
        if left < 1.0:
            raise ApiError(
                429,
                f"this API key has sent {self._most:g} feedbacks in a minute (serve.max_feedback_per_minute); "
                "retry after the time in Retry-After",
                code="too_many_requests",
                retry_after_s=(1.0 - left) / self._per_s,
            )
        self._left[label] = (left - 1.0, now)
