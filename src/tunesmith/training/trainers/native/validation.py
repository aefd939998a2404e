"""Validation inside training: a fixed set of cases, one declared metric, a few answers to look at."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy

from tunesmith.core.errors import ConfigError
from tunesmith.datasets.report import Example
from tunesmith.models.chat import ChatFormat
from tunesmith.models.generation import answer_all
from tunesmith.models.packs import Item, Packer
from tunesmith.models.scoring import ComputeBackend, answer_log_probs, evaluating
from tunesmith.profiles.profile import Method
from tunesmith.programs.protocol import SampleOutput
from tunesmith.runs.spec import RunSpec
from tunesmith.training.trainers.native.objectives import Objective, loss_denominators

LOSS, ACCURACY = "validation_loss", "validation_reward_accuracy"
_NUM_SAMPLES = 4
_SAMPLE_TOKENS = 40
_SAMPLE_CHARACTERS = 500


def chosen_cases(num: int, max_cases: int, seed: int) -> list[int]:
    """Which of the split's examples are validated on: the same ones at every step of every attempt."""
    if num <= max_cases:
        return list(range(num))
    return sorted(numpy.random.default_rng([seed, num]).choice(num, size=max_cases, replace=False).tolist())


def check_metric(run: RunSpec) -> None:
    measured = {LOSS} if run.method is Method.SFT else {LOSS, ACCURACY}
    if run.validation.best_metric not in measured:
        raise ConfigError(
            f"validation.best_metric: {run.validation.best_metric!r} is not measured by this trainer for {run.method}; "
            f"it measures {' and '.join(sorted(measured))}"
        )


def is_better(value: float, best: float | None, direction: str) -> bool:
    """Strictly better in the declared direction; what is not a finite number never is, also as the first."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best if direction == "lower" else value > best


class _Stopped(Exception):
    """Somebody wants the validation to end early."""


class Validator:
    """The fixed cases of one training."""

    def __init__(
        self,
        backend: ComputeBackend,
        chat: ChatFormat,
        items: Sequence[Item],
        examples: Sequence[Example],
        packer: Packer,
        objective: Objective,
    ) -> None:
        self._backend, self._chat, self._items, self._packer, self._objective = backend, chat, items, packer, objective
        self._samples = [example for example in examples if example.chosen][:_NUM_SAMPLES]

    def measure(self, on_case: Callable[[int, int], bool]) -> dict[str, float] | None:
        """The method's loss over all cases, as one step would have it, and its figures; None if `on_case` said stop."""
        denominators, done = loss_denominators(self._items), 0

        def score(items: Sequence[Item]) -> dict[str, list[float]]:
            found = answer_log_probs(self._backend, items, self._packer, lambda _: on_case(0, len(self._items)))
            if found is None:
                raise _Stopped
            return found

        values: defaultdict[str, list[float]] = defaultdict(list)
        with evaluating(self._backend.model), contextlib.suppress(_Stopped):
            kl_estimate = self._objective.kl_estimate(self._items, score)
            for group in self._packer.groups(self._items):
                some = [self._items[index] for index in group]
                spans = self._backend.span_log_probs(self._packer.micro_batch(some)).double()
                terms = self._objective.terms(some, spans, denominators, kl_estimate)
                values[LOSS].append(float(terms.loss))
                for name, figure in terms.figures.items():
                    values[f"validation_{name}"].append(float(figure))
                done += len(some)
                if not on_case(done, len(self._items)):
                    raise _Stopped
            return {name: math.fsum(parts) for name, parts in values.items()}
        return None

    def samples(self) -> list[SampleOutput]:
        """Greedy answers to a few cases, short ones, for people to look at."""
        prompts = [self._chat.prompt(example.messages[:-1]) for example in self._samples]
        answers = answer_all(self._backend.model, self._chat, prompts, _SAMPLE_TOKENS)
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
