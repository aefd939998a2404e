"""Whether the store can be read and written now, as far as the server has noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tunesmith.core.errors import StoreError
from tunesmith.core.logs import logger

log = logger("gateway")
_SLOW_WRITE_S = 4.0


class StoreHealth:
    def __init__(self) -> None:
        self._read_problem: str | None = None
        self._write_problem: str | None = None
        self._writing_since: float | None = None

    @property
    def problem(self) -> str | None:
        """Why the store cannot be read or written; None: it can."""
        since = self._writing_since
        if self._read_problem is None and since is not None and time.monotonic() - since > _SLOW_WRITE_S:
            seconds = time.monotonic() - since
            return f"the store has accepted no writes for {seconds:.0f} s; another process may hold its lock"
        return self._read_problem or self._write_problem

    def record_read(self, problem: str | None) -> None:
        """Record the result of reading it: None, or why that failed."""
        if problem is not None and self._read_problem is None:
            log.warning("store_lost", problem=problem)
        if problem is None and self._read_problem is not None:
            log.info("store_back")
        self._read_problem = problem

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Use around periodic writes, so that a store that accepts none is noticed."""
        self._writing_since = time.monotonic()
        try:
            yield
            self._write_problem = None
        except StoreError as error:
            self._write_problem = error.message
        finally:
            self._writing_since = None
