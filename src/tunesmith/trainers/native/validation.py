"""Validation inside training: a fixed set of cases, one declared metric, a few answers to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from tunesmith.domain.dataset import Example
from tunesmith.domain.profile import Validation
from tunesmith.domain.program import SampleOutput
from tunesmith.errors import ConfigError
from tunesmith.modeling.chat import ChatFormat, Tokenized
from tunesmith.modeling.generation import answer_all
from tunesmith.modeling.scoring import batches_by_tokens, mean_nlls

LOSS = "validation_loss"
_NUM_SAMPLES = 4
_SAMPLE_TOKENS = 40
_SAMPLE_CHARACTERS = 500


def chosen_cases(num: int, max_cases: int, seed: int) -> list[int]:
    """Which of the split's examples are validated on: the same ones at every step of every attempt."""
    if num <= max_cases:
        return list(range(num))
    return sorted(numpy.random.default_rng([seed, num]).choice(num, size=max_cases, replace=False).tolist())


def check_metric(validation: Validation) -> None:
    if validation.best_metric != LOSS:
        raise ConfigError(
            f"validation.best_metric: {validation.best_metric!r} is not measured by this trainer; it measures {LOSS}"
        )


def is_better(value: float, best: float | None, direction: str) -> bool:
    """Strictly better in the declared direction; what is not a finite number never is, also as the first."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best if direction == "lower" else value > best


class Validator:
    """The fixed cases of one training."""

    def __init__(
        self, chat: ChatFormat, cases: Sequence[Tokenized], examples: Sequence[Example], micro_batch_tokens: int
    ) -> None:
        self._chat, self._cases = chat, cases
        self._samples = examples[:_NUM_SAMPLES]
        self._batches = batches_by_tokens([len(case) for case in cases], micro_batch_tokens)

    def loss(self, adapted: Any, on_batch: Callable[[int, int], bool]) -> float | None:
        """Mean loss over all trained tokens of the cases; None if `on_batch` said stop."""
        total = len(self._cases)
        means = mean_nlls(adapted, self._cases, self._chat.pad_id, self._batches, lambda done: on_batch(done, total))
        if means is None:
            return None
        weights = [case.num_trained for case in self._cases]
        return math.fsum(mean * weight for mean, weight in zip(means, weights, strict=True)) / sum(weights)

    def samples(self, adapted: Any) -> list[SampleOutput]:
        """Greedy answers to a few cases, short ones, for people to look at."""
        prompts = [self._chat.prompt(example.messages[:-1]) for example in self._samples]
        answers = answer_all(adapted, self._chat, prompts, _SAMPLE_TOKENS)
        return [
            SampleOutput(
                prompt=_cut(example.messages[-2]["content"] if len(example.messages) > 1 else ""),
                expected=_cut(example.messages[-1]["content"]),
                answer=_cut(answer.text),
            )
            for example, answer in zip(self._samples, answers, strict=True)
        ]


def _cut(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARACTERS else text[:_SAMPLE_CHARACTERS] + "…"
