"""Who is computed next: rows join running batches, every batch gets its turn, what fails fails alone."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.core.logs import logger
from tunesmith.serving.engine.batch import Batch
from tunesmith.serving.engine.lora_layers import RowsLost, Sites
from tunesmith.serving.engine.runner_selection import fastest_way
from tunesmith.serving.engine.sequence_state import EngineRefusal, Row

_PROMPT_TOKENS = 4096
"""Most tokens of prompts that are read together."""
_PASS_TOKENS, _PASS_TOKENS_CUDA = 512, 4096
"""Most of them in one pass, for which all rows that are being answered wait."""
_ALIKE, _LITTLE = 1.5, 32
"""Prompts are read together while the longest is at most so many times the shortest, and a little more."""
_COMPANY, _PATIENCE_S = 8, 0.02
"""Whoever waits joins once there is one for so many rows under way, or after this time."""
_RETRY_AFTER_S = 5.0
OUT_OF_MEMORY = "out_of_memory"

log = logger("engine")


@dataclass(eq=False)
class _Joining:
    """Rows whose prompts are being read together."""

    rows: list[Row]
    batch: Batch | None = None
    passes: Iterator[None] | None = None


class Turns:
    """All rows of the engine, waiting or under way. Rows of all adapters share one batch where the model allows it."""

    def __init__(self, model: Any, sites: Sites, pad_id: int, max_batch: int) -> None:
        self._sites, self._pad_id, self._max_batch = sites, pad_id, max_batch
        self.way, self._new_memory = fastest_way(model, sites)
        self._pass_tokens = _PASS_TOKENS_CUDA if next(model.parameters()).is_cuda else _PASS_TOKENS
        self._batches: dict[str | None, Batch] = {}
        self._joining: deque[_Joining] = deque()
        self.waiting: deque[Row] = deque()

    @property
    def num_rows(self) -> int:
        joining = sum(len(group.rows) for group in self._joining)
        return joining + sum(len(batch.rows) for batch in self._batches.values())

    @property
    def num_bytes(self) -> int:
        return sum(batch.num_bytes for batch in self._batches.values())

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._joining and not self._batches

    def rows(self) -> Iterator[Row]:
        yield from self.waiting
        for group in self._joining:
            yield from group.rows
        for batch in self._batches.values():
            yield from batch.rows

    def remove(self, row_id: str) -> Row | None:
        """Take a row out wherever it is."""
        row = next((row for row in self.rows() if row.id == row_id), None)
        if row is None:
            return None
        if row in self.waiting:
            self.waiting.remove(row)
        for group in list(self._joining):
            if row in group.rows:
                # those that were read with it begin again: as much is lost as they have read
                self._joining.remove(group)
                rest = [one for one in group.rows if one is not row]
                self._joining.extendleft([_Joining(rest)] if rest else [])
        for batch in self._batches.values():
            batch.remove(row)
        self._drop_empty()
        return row

    def turn(self) -> None:
        """One token for every row, then a pass over prompts, the last of which writes a row's first token."""
        for batch in list(self._batches.values()):
            self._step(batch)
        if not self._joining and self._is_time_to_join():
            self._joining.append(_Joining(self._alike()))
        if self._joining:
            self._read_on(self._joining[0])
        self._drop_empty()

    def _is_time_to_join(self) -> bool:
        """Reading a prompt is a pass of its own: while others are answered, a moment is given for more to come."""
        if not self.waiting or self.num_rows >= self._max_batch:
            return False
        enough = max(1, self.num_rows // _COMPANY)
        return len(self.waiting) >= enough or time.monotonic() - self.waiting[0].since_s >= _PATIENCE_S

    def _key(self, row: Row) -> str | None:
        return None if self._sites.can_mix else row.adapter

    def _alike(self) -> list[Row]:
        """Whoever waits longest, and others whose prompts are about as long; they wait no more."""
        first = self.waiting[0]
        low = high = len(first.seen)
        found: list[Row] = []
        for row in self.waiting:
            new_low, new_high = min(low, len(row.seen)), max(high, len(row.seen))
            is_alike = new_high <= new_low * _ALIKE + _LITTLE and self._key(row) == self._key(first)
            if row is not first and (not is_alike or new_high * (len(found) + 1) > _PROMPT_TOKENS):
                continue
            low, high = new_low, new_high
            found.append(row)
            if self.num_rows + len(found) == self._max_batch:
                break
        for row in found:
            self.waiting.remove(row)
        return found

    def _read_on(self, group: _Joining) -> None:
        """One pass over the prompts of a group."""
        if group.passes is None:
            key = self._key(group.rows[0])
            if key not in self._batches:
                self._batches[key] = Batch(self._new_memory(self._pass_tokens), self._pad_id)
            group.batch = self._batches[key]
            group.passes = group.batch.join(group.rows)
        try:
            next(group.passes)
        except StopIteration:
            self._joining.popleft()
        except RowsLost:
            self._keep_apart()
        except (MemoryError, RuntimeError, ValueError, IndexError, TypeError) as error:
            self._joining.popleft()
            refusal = _refusal(error)
            if len(group.rows) > 1:  # it may be one of them, or all of them together
                self._joining.extendleft(_Joining([row]) for row in reversed(group.rows))
            else:
                group.rows[0].listener.failed(group.rows[0], refusal)

    def _step(self, batch: Batch) -> None:
        while batch.rows:
            try:
                batch.step()
            except RowsLost:
                self._keep_apart()
            except (MemoryError, RuntimeError, ValueError, IndexError, TypeError) as error:
                refusal = _refusal(error)
                half = len(batch.rows) // 2 if refusal.code == OUT_OF_MEMORY else 0
                for row in batch.rows[half:]:  # those that came last
                    batch.remove(row)
                    row.listener.failed(row, refusal)
            else:
                return

    def _keep_apart(self) -> None:
        """This model cannot compute adapters side by side: from now on each has batches of its own."""
        self._sites.can_mix = False
        under_way = [row for row in self.rows() if row not in self.waiting]
        for batch in self._batches.values():
            batch.rows.clear()
        self._batches.clear()
        self._joining.clear()
        self.waiting.extendleft(reversed(under_way))

    def _drop_empty(self) -> None:
        """Batches without rows give their memory back, unless rows are about to join them."""
        for key, batch in list(self._batches.items()):
            if not batch.rows and all(group.batch is not batch for group in self._joining):
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
