"""The contract of an evaluator: which metrics it measures, which way each is better, and one score per case.

The evaluator program loads the base once, applies each subject's adapter in turn (candidate, then baseline) and calls
`measure` for it. Whatever several evaluators need, such as the greedy answers, is computed once per subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tunesmith.models.answer import Answer
from tunesmith.programs.protocol import CaseScore
from tunesmith.runs.spec import EvaluateSpec, Subject

__all__ = ["Answer", "Case", "CaseScore", "Direction", "EvaluatorInfo", "Measure", "Metric", "SubjectModel"]

Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A number per case, by which two subjects are compared."""

    name: str
    better: Direction
    """Which way is better; declared, never guessed from the name."""
    description: str
    shown_only: bool = False
    """Measured and shown; the gate decides by it only if a profile makes it primary or gives it a floor."""
    neutral: float | None = None
    """What counts for a side that the metric does not apply to while it applies to the other one. None: it applies to
    every case, and `CaseScore.not_applicable` must not name it."""


@dataclass(frozen=True, eq=False)
class Case:
    """A conversation to score. An evaluator may make cases of its own beside the held-out ones that it is given."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    """The last message is the reference answer."""
    reference: str = ""
    """The reference answer as the model must write it: the text, or the text and the call of a function."""


class SubjectModel(Protocol):
    """The base with the subject's adapter applied, or bare. Its methods compute in batches and report progress."""

    @property
    def spec(self) -> EvaluateSpec:
        """Paths and digests of the base, settings of the evaluation, seed."""

    @property
    def subject(self) -> Subject:
        """Which side it is, and the path and digest of its adapter."""

    @property
    def model(self) -> Any | None:
        """The transformers model in evaluation mode, which an evaluator must not change; None for `sim` adapters."""

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer of the base; None for `sim` adapters."""

    def losses(self, cases: Sequence[Case]) -> list[float]:
        """Mean loss per token of each reference answer, in the order of the cases."""

    def answers(self, cases: Sequence[Case], *, sampled: bool = False) -> list[Answer]:
        """What the model answers to the messages before each reference: greedy, or at `evaluation.temperature`."""


Measure = Callable[[SubjectModel, Sequence[Case], Sequence[str]], Iterable[CaseScore]]
"""Called once per subject with the cases and those of its metrics that are wanted. One `CaseScore` per case, in order:
a value for each wanted metric, or `error`, why this case cannot be scored. An error is never a score. A metric with a
`neutral` value may be named in `not_applicable` instead: the case is left out where it applies to neither side."""


@dataclass(frozen=True)
class EvaluatorInfo:
    """An evaluator by name. Importing it must be cheap: import torch and the like inside `measure`."""

    name: str
    description: str
    metrics: tuple[Metric, ...]
    measure: Measure
