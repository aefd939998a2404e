"""Held-out loss: how surprising the reference answer is to the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunesmith.evaluation.evaluators.base import Case, CaseScore, EvaluatorInfo, Metric, SubjectModel

LOSS = "heldout_loss"


def measure(model: SubjectModel, cases: Sequence[Case], metrics: Sequence[str]) -> Iterable[CaseScore]:
    for case, loss in zip(cases, model.losses(cases), strict=True):
        yield CaseScore(case_id=case.id, values={LOSS: loss})


EVALUATOR = EvaluatorInfo(
    name=LOSS,
    description="loss of the reference answer",
    metrics=(Metric(LOSS, "lower", "mean loss per token of the reference answer"),),
    measure=measure,
)
