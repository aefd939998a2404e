"""An evaluation as the client shows it: what was measured, what the gate decided, and every check of it."""

from __future__ import annotations

from tunesmith.client.views import EvaluationView
from tunesmith.evaluation.queries import Evaluation


def evaluation_view(evaluation: Evaluation | None) -> EvaluationView | None:
    """None stays None: nothing was evaluated yet."""
    if evaluation is None:
        return None
    judged = evaluation.judged
    established = judged.report.established
    return EvaluationView(
        id=evaluation.id,
        decision=judged.verdict.decision,
        reasons=judged.verdict.reasons,
        checks=tuple(check.model_dump(mode="json") for check in judged.verdict.checks),
        num_cases=judged.report.num_cases,
        confidence=judged.report.confidence,
        comparisons=tuple(comparison.model_dump(mode="json") for comparison in judged.report.comparisons),
        established=None if established is None else established.model_dump(mode="json"),
        evidence=judged.evidence.model_dump(mode="json"),
        scores_path=evaluation.scores_path,
        created_at=evaluation.created_at,
    )
