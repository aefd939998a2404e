"""Evaluation: paired comparison of a candidate with what is live, on the same cases. An error is never a score."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunesmith.core.section import Section
from tunesmith.evaluation.evaluators.base import Direction, Metric
from tunesmith.evaluation.rules.significance import MeanDifference, chance_of_gain
from tunesmith.programs.protocol import CaseScore

_LARGEST = 1e100  # beyond it sums and squares may overflow


class Comparison(Section):
    """One metric on both sides. `difference` is candidate − baseline, turned so that positive is better."""

    metric: str
    better: Direction | None = None
    """Which way the metric is better; None in reports from before this was stored."""
    n: int
    """Cases that were compared."""
    num_left_out: int = 0
    """Cases that the metric applies to on neither side."""
    shown_only: bool = False
    """Measured and shown; it decides nothing unless the policy names it as primary or gives it a floor."""
    candidate: float | None
    baseline: float | None
    difference: float | None
    low: float | None
    high: float | None
    guard_low: float | None = None
    guard_high: float | None = None
    """The wider interval that holds for all guarded metrics together; None in reports from before it was stored."""
    p_value: float | None = None
    """How often chance alone gives a gain at least this large (sign-flip test); None in older reports."""
    problem: str | None = None
    """Why there are no numbers; a comparison with a problem never promotes."""
    at_fault: Literal["candidate", "evidence"] | None = None


class Report(Section):
    """Everything the gate looks at."""

    num_cases: int
    confidence: float
    comparisons: tuple[Comparison, ...]
    established: Comparison | None = None
    """The primary metric on the cases of earlier, proven datasets alone; None where there are none."""
    num_guarded: int = 1
    """Over how many metrics beside the primary one `guard_low` and `guard_high` are corrected."""

    def of(self, metric: str) -> Comparison | None:
        return next((c for c in self.comparisons if c.metric == metric), None)


def compare(
    case_ids: Sequence[str],
    scores: Mapping[str, Sequence[CaseScore]],
    metrics: Sequence[Metric],
    *,
    primary: Metric,
    established: Collection[str] = (),
    confidence: float,
    seed: int,
) -> Report:
    """Pair the two sides case by case and measure each metric; the primary one on the established cases too.

    The primary metric's interval is never corrected: one metric decides about the gain, and every other check can only
    refuse. Of several guarded metrics, one is easily lower by chance; their second interval allows for that.
    """
    num_guarded = max(1, sum(metric.name != primary.name and not metric.shown_only for metric in metrics))
    sides = _Sides(
        {score.case_id: score for score in scores.get("candidate", ())},
        {score.case_id: score for score in scores.get("baseline", ())},
        confidence,
        guard_confidence(confidence, num_guarded),
        seed,
    )
    old = [case_id for case_id in case_ids if case_id in established]
    return Report(
        num_cases=len(case_ids),
        confidence=confidence,
        comparisons=tuple(sides.compare(metric, case_ids) for metric in metrics),
        established=sides.compare(primary, old) if old else None,
        num_guarded=num_guarded,
    )


@dataclass(frozen=True)
class _Sides:
    """The scores of both sides by case, and how sure intervals have to be."""

    candidate: Mapping[str, CaseScore]
    baseline: Mapping[str, CaseScore]
    confidence: float
    guard_confidence: float
    seed: int

    def compare(self, metric: Metric, case_ids: Sequence[str]) -> Comparison:
        if not case_ids:
            return _without_numbers(metric, "there are no cases", "evidence")
        pairs, num_left_out = [], 0
        for case_id in case_ids:
            ours, theirs = (_value(side, case_id, metric.name) for side in (self.candidate, self.baseline))
            if ours is None and theirs is None:
                num_left_out += 1
                continue
            ours = metric.neutral if ours is None else ours
            theirs = metric.neutral if theirs is None else theirs
            if not isinstance(theirs, float):
                return _without_numbers(metric, f"baseline, case {case_id}: {theirs or _NO_SCORE}", "evidence")
            if not isinstance(ours, float):
                at_fault: Literal["candidate", "evidence"] = "candidate" if ours == _NOT_FINITE else "evidence"
                return _without_numbers(metric, f"candidate, case {case_id}: {ours or _NO_SCORE}", at_fault)
            pairs.append((ours, theirs))
        if any(abs(value) > _LARGEST for pair in pairs for value in pair):
            return _without_numbers(metric, "a score is too large to compare", "evidence")
        if not pairs:
            return _without_numbers(metric, f"it applies to none of the {len(case_ids)} cases", "evidence")
        return self._measured(metric, pairs, num_left_out)

    def _measured(self, metric: Metric, pairs: Sequence[tuple[float, float]], num_left_out: int) -> Comparison:
        sign = 1.0 if metric.better == "higher" else -1.0
        differences = [sign * (ours - theirs) for ours, theirs in pairs]
        difference = MeanDifference(differences, self.seed)
        low, high = difference.interval(self.confidence)
        guard_low, guard_high = difference.interval(self.guard_confidence)
        return Comparison(
            metric=metric.name,
            better=metric.better,
            n=len(pairs),
            num_left_out=num_left_out,
            shown_only=metric.shown_only,
            candidate=_mean([ours for ours, _ in pairs]),
            baseline=_mean([theirs for _, theirs in pairs]),
            difference=difference.mean,
            low=low,
            high=high,
            guard_low=guard_low,
            guard_high=guard_high,
            p_value=chance_of_gain(differences, self.seed),
        )


_NOT_FINITE, _NO_SCORE = "not a finite number", "no score"


def _value(side: Mapping[str, CaseScore], case_id: str, metric: str) -> float | str | None:
    """The score of one case, or why there is none; None where the metric does not apply to it."""
    score = side.get(case_id)
    if score is None:
        return _NO_SCORE
    if score.error is not None:
        return f"failed ({score.error[:200]})"
    if metric in score.not_applicable:
        return None
    value = score.values.get(metric)
    if value is None:
        return _NO_SCORE
    return value if math.isfinite(value) else _NOT_FINITE


def paired_interval(differences: Sequence[float], confidence: float, seed: int) -> tuple[float, float]:
    """The confidence interval of the mean difference: bootstrap, or the normal one where n is large."""
    return MeanDifference(differences, seed).interval(confidence)


def guard_confidence(confidence: float, num_guarded: int) -> float:
    """The confidence of each of several intervals with which all of them hold together (Bonferroni)."""
    return 1.0 - (1.0 - confidence) / max(1, num_guarded)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _without_numbers(metric: Metric, problem: str, at_fault: Literal["candidate", "evidence"]) -> Comparison:
    return Comparison(
        metric=metric.name,
        better=metric.better,
        n=0,
        shown_only=metric.shown_only,
        candidate=None,
        baseline=None,
        difference=None,
        low=None,
        high=None,
        problem=problem,
        at_fault=at_fault,
    )
