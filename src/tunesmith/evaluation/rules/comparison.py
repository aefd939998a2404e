"""Evaluation: paired comparison of a candidate with what is live, on the same cases. An error is never a score."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from tunesmith.core.section import Section
from tunesmith.evaluation.evaluators.base import Direction, Metric
from tunesmith.programs.protocol import CaseScore

_RESAMPLES = 2000
_LARGEST = 1e100  # beyond it sums and squares may overflow
_LARGE_N = 5000  # beyond it the mean is normal enough, and resampling only costs time


class Comparison(Section):
    """One metric on both sides. `difference` is candidate − baseline, turned so that positive is better."""

    metric: str
    better: Direction | None = None
    """Which way the metric is better; None in reports from before this was stored."""
    n: int
    candidate: float | None
    baseline: float | None
    difference: float | None
    low: float | None
    high: float | None
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
    """Pair the two sides case by case and measure each metric; the primary one on the established cases too."""
    candidate = {score.case_id: score for score in scores.get("candidate", ())}
    baseline = {score.case_id: score for score in scores.get("baseline", ())}
    comparisons = tuple(_compare_metric(metric, case_ids, candidate, baseline, confidence, seed) for metric in metrics)
    old = [case_id for case_id in case_ids if case_id in established]
    on_old = _compare_metric(primary, old, candidate, baseline, confidence, seed) if old else None
    return Report(num_cases=len(case_ids), confidence=confidence, comparisons=comparisons, established=on_old)


def _compare_metric(
    metric: Metric,
    case_ids: Sequence[str],
    candidate: Mapping[str, CaseScore],
    baseline: Mapping[str, CaseScore],
    confidence: float,
    seed: int,
) -> Comparison:
    if not case_ids:
        return _without_numbers(metric, "there are no cases", "evidence")
    pairs = []
    for case_id in case_ids:
        ours, theirs = _value(candidate, case_id, metric.name), _value(baseline, case_id, metric.name)
        if isinstance(theirs, str):
            return _without_numbers(metric, f"baseline, case {case_id}: {theirs}", "evidence")
        if isinstance(ours, str):
            at_fault: Literal["candidate", "evidence"] = "candidate" if ours == _NOT_FINITE else "evidence"
            return _without_numbers(metric, f"candidate, case {case_id}: {ours}", at_fault)
        pairs.append((ours, theirs))
    if any(abs(value) > _LARGEST for pair in pairs for value in pair):
        return _without_numbers(metric, "a score is too large to compare", "evidence")
    sign = 1.0 if metric.better == "higher" else -1.0
    differences = [sign * (ours - theirs) for ours, theirs in pairs]
    low, high = paired_interval(differences, confidence, seed)
    return Comparison(
        metric=metric.name,
        better=metric.better,
        n=len(pairs),
        candidate=_mean([ours for ours, _ in pairs]),
        baseline=_mean([theirs for _, theirs in pairs]),
        difference=_mean(differences),
        low=low,
        high=high,
    )


_NOT_FINITE = "not a finite number"


def _value(side: Mapping[str, CaseScore], case_id: str, metric: str) -> float | str:
    """The score of one case, or why there is none."""
    score = side.get(case_id)
    if score is None:
        return "no score"
    if score.error is not None:
        return f"failed ({score.error[:200]})"
    value = score.values.get(metric)
    if value is None:
        return "no score"
    return value if math.isfinite(value) else _NOT_FINITE


def paired_interval(differences: Sequence[float], confidence: float, seed: int) -> tuple[float, float]:
    """The confidence interval of the mean difference: bootstrap, or the normal one where n is large."""
    n = len(differences)
    if n > _LARGE_N:
        mean = _mean(differences)
        error = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
        z = _normal_quantile((1 + confidence) / 2)
        return mean - z * error, mean + z * error
    rng = random.Random(seed)  # noqa: S311 - resampling, not secrecy
    means = sorted(sum(rng.choices(differences, k=n)) / n for _ in range(_RESAMPLES))
    tail = (1 - confidence) / 2
    return means[int(tail * _RESAMPLES)], means[min(_RESAMPLES - 1, math.ceil((1 - tail) * _RESAMPLES) - 1)]


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _without_numbers(metric: Metric, problem: str, at_fault: Literal["candidate", "evidence"]) -> Comparison:
    return Comparison(
        metric=metric.name,
        better=metric.better,
        n=0,
        candidate=None,
        baseline=None,
        difference=None,
        low=None,
        high=None,
        problem=problem,
        at_fault=at_fault,
    )
