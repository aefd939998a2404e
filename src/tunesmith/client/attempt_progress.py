"""How far the program of a running attempt has come, from the files that it writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.files import open_plain
from tunesmith.programs.protocol import EVENTS, STATUS

_TAIL = 64 << 10
_PACE_STEPS = 20


@dataclass(frozen=True)
class AttemptProgress:
    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""
    metrics: Mapping[str, float] | None = None
    """Of the newest step."""
    left_s: float | None = None
    """Until the last step at the pace of the newest ones; None while nobody can say."""


def read_progress(folder: Path) -> AttemptProgress | None:
    """None before the program has said anything."""
    try:
        with open_plain(folder / STATUS) as source:
            status = json.loads(source.read(_TAIL))
        phase = str(status["phase"])
        done, total, unit = int(status.get("done", 0)), int(status.get("total", 0)), str(status.get("unit", ""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    steps = _newest_steps(folder / EVENTS)
    metrics = dict(steps[-1]["values"]) if steps else None
    return AttemptProgress(phase, done, total, unit, metrics, _left_s(steps, total) if unit == "step" else None)


def _newest_steps(path: Path) -> list[dict[str, Any]]:
    """The newest `metrics` events, found at the end of the event log."""
    try:
        with open_plain(path) as source:
            source.seek(max(0, os.fstat(source.fileno()).st_size - _TAIL))
            lines = source.read(_TAIL).splitlines(keepends=True)
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        if b'"metrics"' in line and line.endswith(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("type") == "metrics" and isinstance(event.get("values"), dict):
                    found.append(event)
    return found[-_PACE_STEPS:]


def _left_s(steps: list[dict[str, Any]], total: int) -> float | None:
    try:
        first, last = steps[0], steps[-1]
        num_steps, took_s = int(last["step"]) - int(first["step"]), float(last["at"]) - float(first["at"])
        left = (total - int(last["step"])) * took_s / num_steps
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
    return left if math.isfinite(left) and left >= 0 and num_steps > 0 else None
