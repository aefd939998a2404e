"""Exact match: whether the model writes the reference answer, greedily and sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunesmith.evaluation.evaluators.base import Answer, Case, CaseScore, EvaluatorInfo, Metric, SubjectModel

GREEDY, SAMPLED = "exact_match_greedy", "exact_match_sampled"


def measure(model: SubjectModel, cases: Sequence[Case], metrics: Sequence[str]) -> Iterable[CaseScore]:
    by_metric = {name: model.answers(cases, sampled=name == SAMPLED) for name in metrics}
    for number, case in enumerate(cases):
        answers = {name: found[number] for name, found in by_metric.items()}
        yield CaseScore(
            case_id=case.id,
            values={name: float(_is_exact(answer, case.reference)) for name, answer in answers.items()},
            answers={name: answer.text for name, answer in answers.items()},
        )


def _is_exact(answer: Answer, reference: str) -> bool:
    """The same text, but for blanks around it; an answer that had to be cut off is not the answer."""
    return answer.finished and answer.text.strip() == reference.strip()


EVALUATOR = EvaluatorInfo(
    name="exact_match",
    description="whether the model writes the reference answer",
    metrics=(
        Metric(GREEDY, "higher", "share of greedy answers that are the reference answer"),
        Metric(SAMPLED, "higher", "share of answers at evaluation.temperature that are the reference answer"),
    ),
    measure=measure,
)
