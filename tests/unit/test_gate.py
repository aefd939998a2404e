"""The gate fails closed: a truth table, and ten thousand random reports against an independent reading of the rules."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import pytest

from tunesmith.evaluation.evaluators.base import Direction
from tunesmith.evaluation.evaluators.registry import EVALUATORS
from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.evaluation.rules.gate import Decision, decide, describe
from tunesmith.profiles.profile import GateSettings

LOSS, GREEDY, SAMPLED = "heldout_loss", "exact_match_greedy", "exact_match_sampled"
METRICS = {metric.name: metric.better for evaluator in EVALUATORS.values() for metric in evaluator.metrics}


def measured(metric: str = LOSS, difference: float = 0.3, spread: float = 0.1, **changes: Any) -> Comparison:
    """A complete comparison; positive differences are improvements, whichever way the metric points."""
    baseline = 0.5
    sign = 1.0 if METRICS.get(metric) == "higher" else -1.0
    fields = {
        "metric": metric,
        "better": METRICS.get(metric),
        "n": 100,
        "baseline": baseline,
        "candidate": baseline + sign * difference,
        "difference": difference,
        "low": difference - spread,
        "high": difference + spread,
    }
    return Comparison(**{**fields, **changes})


def unmeasured(
    metric: str = LOSS, problem: str = "no score", at_fault: Literal["candidate", "evidence"] = "evidence"
) -> Comparison:
    return Comparison(
        metric=metric, n=0, candidate=None, baseline=None, difference=None, low=None, high=None,
        problem=problem, at_fault=at_fault,
    )  # fmt: skip


def report(*comparisons: Comparison, num_cases: int = 100, established: Comparison | None = None) -> Report:
    return Report(num_cases=num_cases, confidence=0.95, comparisons=comparisons, established=established)


GATE = GateSettings(min_cases=50)
CASES: dict[str, tuple[Report, GateSettings, tuple[str, ...], Decision]] = {
    # the primary metric
    "better": (report(measured()), GATE, (LOSS,), Decision.PROMOTE),
    "worse": (report(measured(difference=-0.3)), GATE, (LOSS,), Decision.REJECT),
    "tie": (report(measured(difference=0.0)), GATE, (LOSS,), Decision.REJECT),
    "tie, held": (report(measured(difference=0.0)), GateSettings(on_tie="hold"), (LOSS,), Decision.HOLD),
    "better but not surely": (report(measured(difference=0.05)), GATE, (LOSS,), Decision.REJECT),
    "worse but not surely": (report(measured(difference=-0.05)), GATE, (LOSS,), Decision.REJECT),
    "interval touches zero": (report(measured(difference=0.1, spread=0.1)), GATE, (LOSS,), Decision.REJECT),
    "interval just above zero": (report(measured(low=1e-9)), GATE, (LOSS,), Decision.PROMOTE),
    "worse is never held": (report(measured(difference=-0.3)), GateSettings(on_tie="hold"), (LOSS,), Decision.REJECT),
    # evidence that does not allow a comparison
    "empty report": (report(), GATE, (LOSS,), Decision.HOLD),
    "no cases": (report(unmeasured(problem="there are no cases"), num_cases=0), GATE, (LOSS,), Decision.HOLD),
    "primary missing": (report(measured(GREEDY)), GATE, (GREEDY,), Decision.HOLD),
    "listed metric missing": (report(measured()), GATE, (LOSS, GREEDY), Decision.HOLD),
    "metric with a floor missing": (report(measured()), GateSettings(floors={GREEDY: 0.1}), (LOSS,), Decision.HOLD),
    "an error of the evaluator": (report(unmeasured()), GATE, (LOSS,), Decision.HOLD),
    "candidate not finite": (report(unmeasured(at_fault="candidate")), GATE, (LOSS,), Decision.REJECT),
    "another metric has an error": (report(measured(), unmeasured(GREEDY)), GATE, (LOSS, GREEDY), Decision.HOLD),
    "another metric not finite": (
        report(measured(), unmeasured(GREEDY, at_fault="candidate")), GATE, (LOSS, GREEDY), Decision.REJECT
    ),
    "measured on a part": (report(measured(n=99)), GATE, (LOSS,), Decision.HOLD),
    "other metric on a part": (report(measured(), measured(GREEDY, n=5)), GATE, (LOSS, GREEDY), Decision.HOLD),
    "more scores than cases": (report(measured(n=101)), GATE, (LOSS,), Decision.HOLD),
    "too few cases": (report(measured(n=49), num_cases=49), GATE, (LOSS,), Decision.HOLD),
    "just enough cases": (report(measured(n=50), num_cases=50), GATE, (LOSS,), Decision.PROMOTE),
    "numbers left out": (report(measured(low=None)), GATE, (LOSS,), Decision.HOLD),
    "mean left out": (report(measured(), measured(GREEDY, candidate=None)), GATE, (LOSS, GREEDY), Decision.HOLD),
    "less sure than the policy wants": (report(measured()), GateSettings(confidence=0.99), (LOSS,), Decision.HOLD),
    # other metrics and floors
    "other metric fell": (report(measured(), measured(GREEDY, -0.06)), GATE, (LOSS, GREEDY), Decision.REJECT),
    "other metric fell a little": (report(measured(), measured(GREEDY, -0.05)), GATE, (LOSS, GREEDY), Decision.PROMOTE),
    "other metric rose": (report(measured(), measured(GREEDY, 0.3)), GATE, (LOSS, GREEDY), Decision.PROMOTE),
    "no drop allowed": (
        report(measured(), measured(GREEDY, -0.001)), GateSettings(max_drop=0.0), (LOSS, GREEDY), Decision.REJECT
    ),
    "below its floor": (
        report(measured(), measured(GREEDY, 0.2)), GateSettings(floors={GREEDY: 0.71}), (LOSS, GREEDY), Decision.REJECT
    ),
    "at its floor": (
        report(measured(), measured(GREEDY, 0.2, candidate=0.7)), GateSettings(floors={GREEDY: 0.7}), (LOSS, GREEDY),
        Decision.PROMOTE,
    ),
    "a loss over its ceiling": (report(measured()), GateSettings(floors={LOSS: 0.19}), (LOSS,), Decision.REJECT),
    "a loss under its ceiling": (report(measured()), GateSettings(floors={LOSS: 0.21}), (LOSS,), Decision.PROMOTE),
    "another primary": (report(measured(GREEDY)), GateSettings(primary=GREEDY), (GREEDY,), Decision.PROMOTE),
    # what was established before
    "forgets": (report(measured(), established=measured(difference=-0.3, n=20)), GATE, (LOSS,), Decision.REJECT),
    "forgets a little": (
        report(measured(), established=measured(difference=-0.04, spread=0.01, n=20)), GATE, (LOSS,), Decision.PROMOTE
    ),
    "perhaps forgets": (
        report(measured(), established=measured(difference=-0.3, spread=0.4, n=20)), GATE, (LOSS,), Decision.PROMOTE
    ),
    "remembers": (report(measured(), established=measured(n=20)), GATE, (LOSS,), Decision.PROMOTE),
    "established not measured": (report(measured(), established=unmeasured()), GATE, (LOSS,), Decision.HOLD),
    "established numbers left out": (
        report(measured(), established=measured(high=None, n=20)), GATE, (LOSS,), Decision.HOLD
    ),
    "established not finite": (
        report(measured(), established=unmeasured(at_fault="candidate")), GATE, (LOSS,), Decision.REJECT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdict_of_the_truth_table(name: str) -> None:
    seen, gate, metrics, expected = CASES[name]
    verdict = decide(seen, gate, metrics)
    assert verdict.decision is expected
    assert verdict.reasons
    assert all(reason.strip() for reason in verdict.reasons)
    assert decide(seen, gate, metrics) == verdict  # a pure function


def test_reasons_name_what_is_wrong() -> None:
    seen = report(measured(), measured(GREEDY, -0.2), measured(SAMPLED, 0.1))
    verdict = decide(seen, GateSettings(floors={SAMPLED: 0.9}), (LOSS, GREEDY, SAMPLED))
    told = "\n".join(verdict.reasons)
    assert "exact_match_greedy fell by 0.200, allowed 0.050" in told
    assert "exact_match_sampled is 0.600, floor 0.900" in told
    assert "although better" in told


def test_describe_says_numbers_interval_and_n() -> None:
    assert describe(measured(), 0.95) == ("heldout_loss 0.5 → 0.2, improvement +0.3 [+0.2, +0.4] at 95%, n = 100")
    assert describe(unmeasured(problem="no score"), 0.95) == "heldout_loss: no score"


def may_promote(seen: Report, gate: GateSettings, metrics: tuple[str, ...]) -> bool:
    """The rules read once more, from DESIGN: complete, finite, enough, better, and nowhere too much worse."""
    by_metric = {c.metric: c for c in seen.comparisons}
    wanted = {*metrics, gate.primary, *gate.floors}
    if not wanted <= set(by_metric) or seen.num_cases < gate.min_cases or seen.confidence < gate.confidence:
        return False
    looked_at = [*seen.comparisons, *([seen.established] if seen.established else [])]
    for c in looked_at:
        numbers = (c.candidate, c.baseline, c.difference, c.low, c.high)
        if c.problem is not None or any(x is None or not math.isfinite(x) for x in numbers):
            return False
    if any(c.n != seen.num_cases for c in seen.comparisons):
        return False
    if not (by_metric[gate.primary].low or 0.0) > 0.0:
        return False
    for c in seen.comparisons:
        floor = gate.floors.get(c.metric)
        value = c.candidate or 0.0
        if floor is not None and (value < floor if METRICS[c.metric] == "higher" else value > floor):
            return False
        if c.metric != gate.primary and (c.difference or 0.0) < -gate.max_drop:
            return False
    old = seen.established
    return old is None or not ((old.high or 0.0) < 0.0 and (old.difference or 0.0) < -gate.max_drop)


def _random_comparison(rng: random.Random, metric: str, num_cases: int) -> Comparison:
    if rng.random() < 0.05:
        return unmeasured(metric, at_fault=rng.choice(["candidate", "evidence"]))
    difference = rng.choice([rng.uniform(-0.2, 0.4), rng.uniform(0.0, 0.4), 0.0, 0.05, -0.05])
    made = measured(metric, difference, rng.choice([0.0, 0.01, 0.1]), n=num_cases)
    if rng.random() < 0.05:
        made = made.model_copy(update={"n": rng.randrange(200)})
    if rng.random() < 0.05:
        made = made.model_copy(update={rng.choice(["candidate", "baseline", "difference", "low", "high"]): None})
    return made


def test_ten_thousand_random_reports_are_promoted_only_by_the_rules() -> None:
    rng = random.Random(17)
    promoted = 0
    for _ in range(10_000):
        num_cases = rng.choice([0, 1, 49, 50, 51, 100, 100, 100])
        known = rng.sample(list(METRICS), rng.randint(1, 3)) if rng.random() < 0.9 else []
        metrics = tuple(known) if rng.random() < 0.9 else tuple(METRICS)
        primary = rng.choice(known) if known and rng.random() < 0.95 else rng.choice(list(METRICS))
        gate = GateSettings(
            primary=primary,
            min_cases=rng.choice([2, 50]),
            confidence=rng.choice([0.9, 0.95, 0.95, 0.95, 0.99]),
            max_drop=rng.choice([0.0, 0.05, 1.0]),
            floors={rng.choice(list(METRICS)): rng.uniform(0.0, 1.0)} if rng.random() < 0.3 else {},
            on_tie=rng.choice(["reject", "hold"]),
        )
        old = _random_comparison(rng, primary, 20) if rng.random() < 0.3 else None
        seen = report(*[_random_comparison(rng, m, num_cases) for m in known], num_cases=num_cases, established=old)
        verdict = decide(seen, gate, metrics)
        assert (verdict.decision is Decision.PROMOTE) == may_promote(seen, gate, metrics), (seen, gate, metrics)
        assert verdict.reasons
        promoted += verdict.decision is Decision.PROMOTE
    assert 500 < promoted < 9_000  # the sample tells something in both directions


@pytest.mark.parametrize(("better", "floor", "decision"), [
    ("lower", 0.3, Decision.PROMOTE), ("lower", 0.1, Decision.REJECT), ("higher", 0.1, Decision.PROMOTE),
    ("higher", 0.3, Decision.REJECT), (None, 0.1, Decision.REJECT), (None, 0.3, Decision.REJECT),
])  # fmt: skip
def test_floor_goes_by_the_direction_in_the_report_and_is_missed_without_one(
    better: Direction | None, floor: float, decision: Decision
) -> None:
    """Of a metric of any evaluator: the name says nothing."""
    seen = measured(metric="words", candidate=0.2, better=better)
    gate = GateSettings(primary="words", floors={"words": floor})
    assert decide(report(seen), gate, ("words",)).decision is decision
