"""How requests are counted: by version, in steps of time, and by narrow ranges of seconds. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

STEP = timedelta(minutes=5)
KEPT = timedelta(days=31)
"""Older counts are deleted; a watch looks back 30 days at most."""
FAILED = -1
_SHORTEST_S = 0.001
_PER_DOUBLING = 4
_LAST_RANGE = 120  # about 12 days


def range_of(seconds: float) -> int:
    """The range that an answer's seconds lie in; ranges grow by 19 % each."""
    if not seconds > _SHORTEST_S:
        return 0
    return min(_LAST_RANGE, math.ceil(_PER_DOUBLING * math.log2(seconds / _SHORTEST_S) - 1e-9))


def seconds_up_to(number: int) -> float:
    """The upper end of a range."""
    return float(_SHORTEST_S * 2.0 ** (number / _PER_DOUBLING))


def step_of(at: datetime) -> datetime:
    """The beginning of the step of time that an instant lies in."""
    step_s = STEP.total_seconds()
    return datetime.fromtimestamp(at.timestamp() // step_s * step_s, UTC)
