"""Format-blind match: whether the reference answer is in what the model writes, whatever stands around it.

Beside exact match it tells a model that knows less from one that only writes it differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tunesmith.evaluation.evaluators.base import Case, CaseScore, EvaluatorInfo, Metric, SubjectModel
from tunesmith.verifiers.entities import normalised

GREEDY, SAMPLED = "format_blind_match_greedy", "format_blind_match_sampled"
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_LEAD = re.compile(r".*(?::|=|\bis\b|\bare\b)", re.DOTALL | re.IGNORECASE)
_AROUND = " \t\r\n.,;:!?'’\"“”„«»`*_()[]"
_MAX_CHARS = 100_000  # of an answer; a hostile one costs little
_MAX_STARTS = 50  # places at which JSON may begin
_MAX_DEPTH = 32


def measure(model: SubjectModel, cases: Sequence[Case], metrics: Sequence[str]) -> Iterable[CaseScore]:
    by_metric = {name: model.answers(cases, sampled=name == SAMPLED) for name in metrics}
    for number, case in enumerate(cases):
        answers = {name: found[number].text for name, found in by_metric.items()}
        yield CaseScore(
            case_id=case.id,
            values={name: float(is_same(answer, case.reference)) for name, answer in answers.items()},
            answers=answers,
        )


def is_same(answer: str, reference: str) -> bool:
    """Whether the answer gives the reference, ignoring case, blanks, the layout of JSON, code fences and prose.

    Prose is what stands on other lines, or before a colon, `=`, "is" or "are". A text that merely contains the
    reference somewhere does not count: a list of all labels would always be right.
    """
    answer, reference = answer[:_MAX_CHARS], reference[:_MAX_CHARS]
    value = _json_value(reference)
    if value is not None:
        return any(found == value for found in _json_values(answer))
    wanted = _tidy(reference)
    return any(_tidy(part) == wanted for part in _parts(answer))


def _parts(answer: str) -> Iterator[str]:
    """The pieces of an answer that may be the answer proper."""
    yield answer
    yield from (fenced[1] for fenced in _FENCED.finditer(answer))
    for line in {line for line in answer.splitlines() if line.strip()}:
        yield line
        yield _LEAD.sub("", line, count=1)


def _tidy(text: str) -> str:
    return normalised(text).strip(_AROUND)


def _json_values(answer: str) -> Iterator[Any]:
    """Every object or list in the text, as far as they can be read."""
    decoder = json.JSONDecoder()
    starts = (match.start() for match in re.finditer(r"[{\[]", answer))
    for _, start in zip(range(_MAX_STARTS), starts, strict=False):
        try:
            yield _folded(decoder.raw_decode(answer, start)[0])
        except (ValueError, RecursionError):
            continue


def _json_value(text: str) -> Any | None:
    """The object or list that a text is; None where it is something else, such as a plain word or number."""
    try:
        value = json.loads(text)
        return _folded(value) if isinstance(value, dict | list) else None
    except (ValueError, RecursionError):
        return None


def _folded(value: Any, depth: int = 0) -> Any:
    """As values are compared: texts without case and blanks, true not equal to 1."""
    if depth > _MAX_DEPTH:
        raise ValueError("is nested too deeply")
    if isinstance(value, dict):
        return {normalised(key).strip(): _folded(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_folded(item, depth + 1) for item in value]
    if isinstance(value, bool):
        return ("boolean", value)
    return normalised(value).strip() if isinstance(value, str) else value


EVALUATOR = EvaluatorInfo(
    name="format_blind_match",
    description="whether the model gives the reference answer, in whatever format",
    metrics=(
        Metric(GREEDY, "higher", "share of greedy answers that give the reference answer in some format"),
        Metric(SAMPLED, "higher", "the same share of answers at evaluation.temperature"),
    ),
    measure=measure,
)
