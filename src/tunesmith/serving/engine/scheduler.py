"""The scheduler: continuous batching. Waiting sequences are prefilled into running batches; failures are isolated.

A sequence passes new text and its end to its listener (`engine_io.StreamListener`), which writes them to the socket.
"""

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
from tunesmith.serving.engine.lora_layers import LoraLayers, MixedBatchUnsupported
from tunesmith.serving.engine.runner_selection import fastest_runner
from tunesmith.serving.engine.sequence_state import EngineRefusal, SequenceState

_PROMPT_TOKENS = 4096
"""Maximum prompt tokens of one prefill group."""
_PASS_TOKENS, _PASS_TOKENS_CUDA = 512, 4096
"""Maximum prompt tokens of one prefill pass; all decoding sequences wait for it."""
_MAX_LENGTH_RATIO, _LENGTH_SLACK = 1.5, 32
"""Prompts are prefilled together if the longest is at most ratio times the shortest plus slack tokens."""
_DECODES_PER_PREFILL, _MAX_PREFILL_DELAY_S = 8, 0.02
"""Prefill once one sequence waits per this many decoding ones, or one has waited for this long."""
_RETRY_AFTER_S = 5.0
OUT_OF_MEMORY = "out_of_memory"

log = logger("engine")


@dataclass(eq=False)
class _PrefillGroup:
    """Sequences whose prompts are prefilled together."""

    sequences: list[SequenceState]
    batch: Batch | None = None
    passes: Iterator[None] | None = None


class Scheduler:
    """All sequences of the engine. Sequences of all adapters share one batch if the model supports mixed batches."""

    def __init__(self, model: Any, lora_layers: LoraLayers, pad_id: int, max_batch: int) -> None:
        self._lora_layers, self._pad_id, self._max_batch = lora_layers, pad_id, max_batch
        self.runner_kind, self._new_runner = fastest_runner(model, lora_layers)
        self._pass_tokens = _PASS_TOKENS_CUDA if next(model.parameters()).is_cuda else _PASS_TOKENS
        self._batches: dict[str | None, Batch] = {}
        self._prefilling: deque[_PrefillGroup] = deque()
        self.waiting: deque[SequenceState] = deque()

    @property
    def num_sequences(self) -> int:
        num_prefilling = sum(len(group.sequences) for group in self._prefilling)
        return num_prefilling + sum(len(batch.sequences) for batch in self._batches.values())

    @property
    def num_bytes(self) -> int:
        return sum(batch.num_bytes for batch in self._batches.values())

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._prefilling and not self._batches

    def sequences(self) -> Iterator[SequenceState]:
        yield from self.waiting
        for group in self._prefilling:
            yield from group.sequences
        for batch in self._batches.values():
            yield from batch.sequences

    def remove(self, sequence_id: str) -> SequenceState | None:
        """Remove a sequence, whatever its state; None if there is no such sequence."""
        sequence = next((sequence for sequence in self.sequences() if sequence.id == sequence_id), None)
        if sequence is None:
            return None
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for group in list(self._prefilling):
            if sequence in group.sequences:
                # the others of the group start their prefill again
                self._prefilling.remove(group)
                rest = [other for other in group.sequences if other is not sequence]
                self._prefilling.extendleft([_PrefillGroup(rest)] if rest else [])
        for batch in self._batches.values():
            batch.remove(sequence)
        self._drop_empty()
        return sequence

    def step(self) -> None:
        """Decode one token for every sequence, then run one prefill pass; the last pass of a prompt samples a token."""
        for batch in list(self._batches.values()):
            self._decode(batch)
        if not self._prefilling and self._should_prefill():
            self._prefilling.append(_PrefillGroup(self._next_prefill_group()))
        if self._prefilling:
            self._prefill_chunk(self._prefilling[0])
        self._drop_empty()

    def _should_prefill(self) -> bool:
        """A prefill delays all decoding sequences: wait a moment so that more prompts can share it."""
        if not self.waiting or self.num_sequences >= self._max_batch:
            return False
        enough = max(1, self.num_sequences // _DECODES_PER_PREFILL)
        return len(self.waiting) >= enough or time.monotonic() - self.waiting[0].arrived_s >= _MAX_PREFILL_DELAY_S

    def _key(self, sequence: SequenceState) -> str | None:
        return None if self._lora_layers.supports_mixed_batch else sequence.adapter

    def _next_prefill_group(self) -> list[SequenceState]:
        """Take the sequence that has waited longest, and others with prompts of similar length, from the queue."""
        first = self.waiting[0]
        low = high = len(first.input_ids)
        group: list[SequenceState] = []
        for sequence in self.waiting:
            new_low, new_high = min(low, len(sequence.input_ids)), max(high, len(sequence.input_ids))
            is_similar = new_high <= new_low * _MAX_LENGTH_RATIO + _LENGTH_SLACK and self._key(sequence) == self._key(
                first
            )
            if sequence is not first and (not is_similar or new_high * (len(group) + 1) > _PROMPT_TOKENS):
                continue
            low, high = new_low, new_high
            group.append(sequence)
            if self.num_sequences + len(group) == self._max_batch:
                break
        for sequence in group:
            self.waiting.remove(sequence)
        return group

    def _prefill_chunk(self, group: _PrefillGroup) -> None:
        """One prefill pass over the prompts of a group."""
        if group.passes is None:
            key = self._key(group.sequences[0])
            if key not in self._batches:
                self._batches[key] = Batch(self._new_runner(self._pass_tokens), self._pad_id)
            group.batch = self._batches[key]
            group.passes = group.batch.prefill(group.sequences)
        try:
            next(group.passes)
        except StopIteration:
            self._prefilling.popleft()
        except MixedBatchUnsupported:
            self._disable_mixed_adapters()
        except (MemoryError, RuntimeError, ValueError, IndexError, TypeError) as error:
            self._prefilling.popleft()
            refusal = _refusal(error)
            if len(group.sequences) > 1:  # one of them may be the cause, or all together
                self._prefilling.extendleft(_PrefillGroup([sequence]) for sequence in reversed(group.sequences))
            else:
                group.sequences[0].listener.failed(group.sequences[0], refusal)

    def _decode(self, batch: Batch) -> None:
        while batch.sequences:
            try:
                batch.decode()
            except MixedBatchUnsupported:
                self._disable_mixed_adapters()
            except (MemoryError, RuntimeError, ValueError, IndexError, TypeError) as error:
                refusal = _refusal(error)
                half = len(batch.sequences) // 2 if refusal.code == OUT_OF_MEMORY else 0
                for sequence in batch.sequences[half:]:  # the newest
                    batch.remove(sequence)
                    sequence.listener.failed(sequence, refusal)
            else:
                return

    def _disable_mixed_adapters(self) -> None:
        """The model does not support mixed batches: from now on each adapter gets its own batch."""
        self._lora_layers.supports_mixed_batch = False
        running = [sequence for sequence in self.sequences() if sequence not in self.waiting]
        for batch in self._batches.values():
            batch.sequences.clear()
        self._batches.clear()
        self._prefilling.clear()
        self.waiting.extendleft(reversed(running))

    def _drop_empty(self) -> None:
        """Free the cache of empty batches, unless a prefill is about to fill them."""
        for key, batch in list(self._batches.items()):
            if not batch.sequences and all(group.batch is not batch for group in self._prefilling):
                del self._batches[key]


def _refusal(error: Exception) -> EngineRefusal:
    """Map an exception to a request error. Re-raises device failures, which end the engine."""
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
        "the engine is out of memory for this request; retry later, shorten it, or lower serve.max_batch",
        OUT_OF_MEMORY,
        503,
        _RETRY_AFTER_S,
    )
