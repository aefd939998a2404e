"""Who is computed next: rows join running batches, every batch gets its turn, what fails fails alone."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from tunesmith.engine.batch import Batch
from tunesmith.engine.rows import EngineRefusal, Row
from tunesmith.engine.sites import RowsLost, Sites
from tunesmith.engine.ways import fastest_way
from tunesmith.logs import logger

_PROMPT_TOKENS = 2048
"""Most tokens of one first pass: rows that are being answered wait for it."""
_ALIKE, _LITTLE = 1.5, 32
"""Prompts are read together while the longest is at most so many times the shortest, and a little more."""
_COMPANY, _PATIENCE_S = 8, 0.02
"""Whoever waits joins once there is one for so many rows under way, or after this time."""
_RETRY_AFTER_S = 5.0
OUT_OF_MEMORY = "out_of_memory"

log = logger("engine")


class Turns:
    """All rows of the engine, waiting or under way. Rows of all adapters share one batch where the model allows it."""

    def __init__(self, model: Any, sites: Sites, pad_id: int, max_batch: int) -> None:
        self._sites, self._pad_id, self._max_batch = sites, pad_id, max_batch
        self.way, self._new_memory = fastest_way(model, sites)
        self._batches: dict[str | None, Batch] = {}
        self.waiting: deque[Row] = deque()

    @property
    def num_rows(self) -> int:
        return sum(len(batch.rows) for batch in self._batches.values())

    @property
    def num_bytes(self) -> int:
        return sum(batch.num_bytes for batch in self._batches.values())

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._batches

    def rows(self) -> Iterator[Row]:
        yield from self.waiting
        for batch in self._batches.values():
            yield from batch.rows

    def remove(self, row_id: str) -> Row | None:
        """Take a row out wherever it is."""
        row = next((row for row in self.rows() if row.id == row_id), None)
        if row is None:
            return None
        if row in self.waiting:
            self.waiting.remove(row)
        for batch in self._batches.values():
            batch.remove(row)
        self._drop_empty()
        return row

    def turn(self) -> None:
        """One token for every row, then let some that wait join, which writes their first."""
        for batch in list(self._batches.values()):
            self._step(batch)
        self._drop_empty()
        room = self._max_batch - self.num_rows
        if room > 0 and self.waiting and self._is_time_to_join():
            groups: dict[str | None, list[Row]] = {}
            for row in self._alike(room):
                self.waiting.remove(row)
                groups.setdefault(self._key(row), []).append(row)
            for rows in groups.values():
                self._join(rows)
            self._drop_empty()

    def _is_time_to_join(self) -> bool:
        """Reading a prompt is a pass of its own: while others are answered, a moment is given for more to come."""
        enough = max(1, self.num_rows // _COMPANY)
        return len(self.waiting) >= enough or time.monotonic() - self.waiting[0].since_s >= _PATIENCE_S

    def _key(self, row: Row) -> str | None:
        return None if self._sites.can_mix else row.adapter

    def _alike(self, room: int) -> list[Row]:
        """Whoever waits longest, and others whose prompts are about as long."""
        first = len(self.waiting[0].seen)
        low = high = first
        found: list[Row] = []
        for row in self.waiting:
            length = len(row.seen)
            new_low, new_high = min(low, length), max(high, length)
            if found and (new_high > new_low * _ALIKE + _LITTLE or new_high * (len(found) + 1) > _PROMPT_TOKENS):
                continue
            low, high = new_low, new_high
            found.append(row)
            if len(found) == room:
                break
        return found

    def _join(self, rows: list[Row]) -> None:
        key = self._key(rows[0])
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = Batch(self._new_memory(), self._pad_id)
        try:
            batch.join(rows)
        except RowsLost:
            self._keep_apart(rows)
        except (MemoryError, RuntimeError, ValueError, IndexError, TypeError) as error:
            refusal = _refusal(error)
            if len(rows) == 1:
                rows[0].listener.failed(rows[0], refusal)
                return
            for row in rows:
                self._join([row])

    def _step(self, batch: Batch) -> None:
        while batch.rows:
            try:
                batch.step()
            except RowsLost:
                self._keep_apart([])
            except (MemoryError, RuntimeError, ValueError, IndexError, TypeError) as error:
                refusal = _refusal(error)
                half = len(batch.rows) // 2 if refusal.code == OUT_OF_MEMORY else 0
                for row in batch.rows[half:]:  # those that came last
                    batch.remove(row)
                    row.listener.failed(row, refusal)
            else:
                return

    def _keep_apart(self, joining: list[Row]) -> None:
        """This model cannot compute adapters side by side: from now on each has batches of its own."""
        self._sites.can_mix = False
        under_way = [row for batch in self._batches.values() for row in batch.rows]
        for batch in self._batches.values():
            batch.rows.clear()
        self._batches.clear()
        self.waiting.extendleft(reversed([*under_way, *joining]))

    def _drop_empty(self) -> None:
        for key in [key for key, batch in self._batches.items() if not batch.rows]:
            del self._batches[key]


def _refusal(error: Exception) -> EngineRefusal:
    """What to tell whose rows they were; the loss of the device is raised again: nothing can be computed on it."""
    if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
        raise error
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "memory" not in str(error).lower():
        log.exception("pass_failed")
        reason = " ".join(str(error).split())[:200]
        return EngineRefusal(f"the model could not compute this request ({reason})", "engine", 500)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return EngineRefusal(
        "the engine has not enough memory for this request now; ask again, or for less at once (serve.max_batch)",
        OUT_OF_MEMORY,
        503,
        _RETRY_AFTER_S,
    )
