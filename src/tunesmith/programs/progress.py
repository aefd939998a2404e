"""Whether an event of a program is progress: only a step, case, byte or phase that was not told before.

A program that hangs may go on writing log lines, or the metrics of one step, for ever. That keeps nobody alive.
"""

from __future__ import annotations

import time

from tunesmith.profiles.settings import Phase
from tunesmith.programs.protocol import (
    CheckpointEvent,
    Event,
    Finished,
    Metrics,
    PhaseEvent,
    Progress,
    Started,
    ValidationEvent,
)

_STEP = "step"
_MAX_MARKS = 32
"""Kinds of progress between two steps; a program with ever new phases or units does not get further by them."""

Mark = tuple[str, ...]


class Advance:
    """How far one program has come. Marks only rise; a new step begins all others anew."""

    def __init__(self) -> None:
        self.phase = Phase.LOAD
        self._moved = time.monotonic()
        self._detail = ""
        self._steps: dict[Mark, int] = {}
        self._marks: dict[Mark, int] = {}

    @property
    def idle_s(self) -> float:
        """Seconds since the program last got further, or since it was started."""
        return time.monotonic() - self._moved

    def takes(self, event: Event) -> bool:
        """Whether the program got further with this event; remembers how far."""
        if isinstance(event, PhaseEvent):
            self.phase, self._detail = event.phase, event.detail
        is_new = self._is_new(event)
        if is_new:
            self._moved = time.monotonic()
        return is_new

    def _is_new(self, event: Event) -> bool:
        match event:
            case Started() | Finished():
                return self._rises(self._steps, (event.type,), 1)
            case Metrics(step=step):
                return self._steps_on(("metrics",), step)
            case Progress(done=done, total=total, unit=unit) if unit == _STEP:
                return done <= total and self._steps_on(("progress",), done)
            case Progress(done=done, total=total, unit=unit):
                return done <= total and self._rises(self._marks, ("progress", self.phase, self._detail, unit), done)
            case CheckpointEvent(step=step) | ValidationEvent(step=step):
                return self._rises(self._steps, (event.type,), step)
            case PhaseEvent(phase=phase, detail=detail):
                return self._rises(self._marks, ("phase", phase, detail), 0)
            case _:  # a log line, or an acknowledgement
                return False

    def _steps_on(self, mark: Mark, step: int) -> bool:
        if not self._rises(self._steps, mark, step):
            return False
        self._marks.clear()
        return True

    def _rises(self, marks: dict[Mark, int], mark: Mark, value: int) -> bool:
        if value <= marks.get(mark, -1) or (mark not in marks and len(marks) >= _MAX_MARKS):
            return False
        marks[mark] = value
        return True
