"""A batch of sequences: they enter with a prefill and are removed when their answer is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tunesmith.serving.engine.runner import ModelRunner
from tunesmith.serving.engine.sampling import sample
from tunesmith.serving.engine.sequence_state import SequenceState


class Batch:
    """Each pass generates one token per sequence; a pass that fails leaves the batch unchanged."""

    def __init__(self, runner: ModelRunner, pad_id: int) -> None:
        self._runner, self._pad_id = runner, pad_id
        self.sequences: list[SequenceState] = []

    @property
    def num_bytes(self) -> int:
        return self._runner.num_bytes

    def prefill(self, sequences: Sequence[SequenceState]) -> Iterator[None]:
        """Prefill the prompts, one pass at a time, then sample the first token of each sequence."""
        logits = yield from self._runner.prefill(
            [sequence.input_ids for sequence in sequences], [sequence.adapter for sequence in sequences], self._pad_id
        )
        self.sequences += sequences
        self._append(range(len(self.sequences) - len(sequences), len(self.sequences)), logits)

    def decode(self) -> None:
        """One more token for every sequence."""
        logits = self._runner.decode(
            [sequence.last for sequence in self.sequences], [sequence.adapter for sequence in self.sequences]
        )
        self._append(range(len(self.sequences)), logits)

    def remove(self, sequence: SequenceState) -> None:
        """Drop a cancelled or failed sequence."""
        number = next((number for number, one in enumerate(self.sequences) if one is sequence), None)
        if number is not None:
            self._free_slot(number)

    def _append(self, numbers: range, logits: Any) -> None:
        sampled = sample(logits, [self.sequences[number].sampling for number in numbers])
        done = [
            number
            for number, token in zip(numbers, sampled, strict=True)
            if not self.sequences[number].append_token(token)
        ]
        for number in reversed(done):
            self._free_slot(number)

    def _free_slot(self, number: int) -> None:
        self._runner.free_slot(number)
        self.sequences[number] = self.sequences[-1]
        self.sequences.pop()
