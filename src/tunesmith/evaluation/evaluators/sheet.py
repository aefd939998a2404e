"""What was measured of one subject: the scores of all evaluators, case by case, each held to the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tunesmith.evaluation.evaluators.base import Case, CaseScore, EvaluatorInfo, SubjectModel
from tunesmith.evaluation.evaluators.registry import EVALUATORS
from tunesmith.programs.host import ProgramFailure, as_failure
from tunesmith.runs.rules.task import ErrorClass


class Sheet:
    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = tuple(cases)
        self._values: dict[str, dict[str, float]] = {case.id: {} for case in cases}
        self._answers: dict[str, dict[str, str]] = {case.id: {} for case in cases}
        self._not_applicable: dict[str, tuple[str, ...]] = {case.id: () for case in cases}
        self._errors: dict[str, str] = {}

    def measure(self, evaluator: EvaluatorInfo, metrics: Sequence[str], model: SubjectModel) -> None:
        """Let the evaluator score every case; an evaluator that fails or breaks the contract ends the program."""
        try:
            scores = list(evaluator.measure(model, self._cases, metrics))
        except Exception as error:
            if evaluator.name in EVALUATORS:
                raise
            failure = as_failure(error)
            raise ProgramFailure(failure.error_class, f"evaluator {evaluator.name}: {failure.message}") from error
        odd = next((score for score in scores if not isinstance(score, CaseScore)), None)
        if odd is not None:
            raise _broken(evaluator, f"it returned a {type(odd).__name__}, not a CaseScore")
        if [score.case_id for score in scores] != [case.id for case in self._cases]:
            raise _broken(evaluator, f"it scored {len(scores)} cases, not the {len(self._cases)} given, in their order")
        for score in scores:
            self._take(evaluator, metrics, score)

    def scores(self, ids: Sequence[str], errors: Mapping[str, str]) -> tuple[CaseScore, ...]:
        """One score per case of the file, in its order; `errors` are those that no evaluator was given."""
        return tuple(self._score(case_id, errors.get(case_id) or self._errors.get(case_id)) for case_id in ids)

    def _take(self, evaluator: EvaluatorInfo, metrics: Sequence[str], score: CaseScore) -> None:
        for name in sorted({*score.values, *score.answers, *score.not_applicable} - set(metrics)):
            raise _broken(evaluator, f"it was not asked for {name!r}")
        always = {metric.name for metric in evaluator.metrics if metric.neutral is None}
        for name in sorted(set(score.not_applicable) & (always | set(score.values))):
            raise _broken(evaluator, f"{name!r} is not applicable to a case, and has a value or no neutral one")
        self._answers[score.case_id] |= score.answers
        self._not_applicable[score.case_id] += score.not_applicable
        problem = score.error
        for metric in metrics:
            if metric in score.not_applicable:
                continue
            value = score.values.get(metric)
            if value is None:
                problem = problem or f"evaluator {evaluator.name} gave no value of {metric}"
            elif not math.isfinite(value):
                problem = problem or f"{metric} is {value}"
        self._values[score.case_id] |= score.values
        if problem is not None:
            self._errors.setdefault(score.case_id, problem)

    def _score(self, case_id: str, error: str | None) -> CaseScore:
        answers = self._answers.get(case_id, {})
        if error is not None:
            return CaseScore(case_id=case_id, answers=answers, error=error)
        return CaseScore(
            case_id=case_id,
            values=self._values[case_id],
            not_applicable=self._not_applicable[case_id],
            answers=answers,
        )


def _broken(evaluator: EvaluatorInfo, what: str) -> ProgramFailure:
    return ProgramFailure(ErrorClass.BUG, f"evaluator {evaluator.name} broke its contract: {what}")
