"""An evaluator: how many greedy answers are JSON, and how long they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tunesmith.evaluation.evaluators.base import Case, CaseScore, EvaluatorInfo, Metric, SubjectModel


def measure(model: SubjectModel, cases: Sequence[Case], metrics: Sequence[str]) -> Iterable[CaseScore]:
    for case, answer in zip(cases, model.answers(cases), strict=True):
        if not _is_json(case.reference):
            yield CaseScore(case_id=case.id, error="the reference answer is not JSON, so the answer need not be")
            continue
        values = {
            "json_valid": float(answer.finished and _is_json(answer.text)),
            "answer_words": float(len(answer.text.split())),
        }
        yield CaseScore(
            case_id=case.id,
            values={name: values[name] for name in metrics},
            answers=dict.fromkeys(metrics, answer.text),  # stored beside the values, for people
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


EVALUATOR = EvaluatorInfo(
    name="json_answers",
    description="greedy answers that must be JSON",
    metrics=(
        Metric("json_valid", "higher", "share of greedy answers that are JSON"),
        Metric("answer_words", "lower", "words of a greedy answer"),
    ),
    measure=measure,
)
