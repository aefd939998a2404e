"""Generation under verifiers: what a verifier of the profile says about the answers, greedy and sampled.

The same verifiers check captured answers, so that a number here means what it means for live traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from tunesmith.evaluation.evaluators.base import Case, CaseScore, EvaluatorInfo, Metric, SubjectModel
from tunesmith.verifiers.base import Finding, Interaction, Verifier
from tunesmith.verifiers.builtin import BUILTIN
from tunesmith.verifiers.metric_names import is_sampled, metric_names
from tunesmith.verifiers.registry import verify

_NOTHING_WRONG = 1.0


def evaluator_of_verifier(verifier: Verifier) -> EvaluatorInfo:
    """The evaluator of one verifier, ours or an installed one: two metrics, both better if higher."""
    greedy, sampled = metric_names(verifier.name)
    return EvaluatorInfo(
        name=greedy,
        description=f"generated answers under the verifier {verifier.name}",
        metrics=tuple(
            Metric(name, "higher", f"{verifier.says}: mean score of {how}", verifier.monitors_only, _NOTHING_WRONG)
            for name, how in ((greedy, "greedy answers"), (sampled, "answers at evaluation.temperature"))
        ),
        measure=partial(_measure, verifier.name),
    )


def _measure(verifier: str, model: SubjectModel, cases: Sequence[Case], metrics: Sequence[str]) -> Iterable[CaseScore]:
    wanted = {verifier: model.spec.verifiers[verifier]}
    by_metric = {name: model.answers(cases, sampled=is_sampled(name)) for name in metrics}
    for number, case in enumerate(cases):
        answers = {name: found[number].text for name, found in by_metric.items()}
        findings = {name: verify(_interaction(case, text), wanted)[verifier] for name, text in answers.items()}
        yield CaseScore(
            case_id=case.id,
            values={name: found.score for name, found in findings.items() if found.score is not None},
            not_applicable=tuple(name for name, found in findings.items() if found.score is None),
            answers=answers,
            error=next(filter(None, map(_failure, findings.values())), None),
        )


def _interaction(case: Case, answer: str) -> Interaction:
    return Interaction((*case.messages[:-1], {"role": "assistant", "content": answer}), case.reference)


def _failure(finding: Finding) -> str | None:
    """A verifier that could not check an answer flags it without a score; the case then has none here, either."""
    return finding.reason if finding.score is None and finding.flagged else None


EVALUATORS = tuple(evaluator_of_verifier(verifier) for verifier in BUILTIN)
