"""Progress of an evaluation: one unit is one case under one metric of one subject."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tunesmith.programs.host import Program


class Terminated(BaseException):
    """TERM arrived: nothing is kept, the evaluation is made again. No evaluator may catch it by `except Exception`."""


class CaseProgress:
    def __init__(self, program: Program, total: int) -> None:
        self._program = program
        self._done, self._total, self._turn_end = 0, total, 0

    @contextmanager
    def turn(self, planned: int) -> Iterator[None]:
        """One evaluator under one subject; afterwards its part of the total is done, whatever it reused."""
        self._turn_end = self._done + planned
        yield
        if self._done < self._turn_end:
            self.advance(self._turn_end - self._done)

    def advance(self, num: int) -> None:
        """Tell that so many more cases are done; raises Terminated if the program has to end."""
        self._done += num
        more_than_planned = max(0, self._done - self._turn_end)  # an evaluator may compute more than one thing per case
        self._turn_end += more_than_planned
        self._total += more_than_planned
        self._program.progress(self._done, self._total, "case")
        if self._program.terminating:
            raise Terminated
