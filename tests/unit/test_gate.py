"""The gate fails closed: a truth table, and ten thousand random reports against an independent reading of the rules."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import pytest

from tunesmith.evaluation.evaluators.base import Direction
from tunesmith.evaluation.evaluators.registry import EVALUATORS
from tunesmith.evaluation.rules.checks import max_p_value
from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.evaluation.rules.gate import Decision, Evidence, Judged, Verdict, decide, describe, missing_evidence
from tunesmith.profiles.profile import GateSettings

LOSS, GREEDY, SAMPLED = "heldout_loss", "exact_match_greedy", "exact_match_sampled"
METRICS = {
    metric.name: metric.better for name in ("heldout_loss", "exact_match") for metric in EVALUATORS[name].metrics
}


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
    "better by too little": (report(measured(difference=2e-5, spread=1e-5)), GATE, (LOSS,), Decision.REJECT),
    "better by too little, held": (
        report(measured(difference=2e-5, spread=1e-5)), GateSettings(on_tie="hold"), (LOSS,), Decision.HOLD
    ),
    "any gain matters": (
        report(measured(difference=2e-5, spread=1e-5)), GateSettings(min_gain=0.0), (LOSS,), Decision.PROMOTE
    ),
    "just enough to matter": (report(measured(difference=0.01, spread=0.005)), GATE, (LOSS,), Decision.PROMOTE),
    "no gain where any matters": (
        report(measured(difference=0.0, spread=0.0)), GateSettings(min_gain=0.0), (LOSS,), Decision.REJECT
    ),
    "the interval need not clear the gain that matters": (
        report(measured(difference=0.3, low=0.001)), GateSettings(min_gain=0.2), (LOSS,), Decision.PROMOTE
    ),
    "not by chance": (report(measured(p_value=max_p_value(0.95))), GATE, (LOSS,), Decision.PROMOTE),
    "interval ends at zero, held": (
        report(measured(difference=-0.1, spread=0.1)), GateSettings(on_tie="hold"), (LOSS,), Decision.HOLD
    ),
    "perhaps by chance": (report(measured(p_value=0.026)), GATE, (LOSS,), Decision.REJECT),
    "perhaps by chance, held": (
        report(measured(p_value=0.026)), GateSettings(on_tie="hold"), (LOSS,), Decision.HOLD
    ),
    "chance of another metric": (
        report(measured(), measured(GREEDY, p_value=1.0)), GATE, (LOSS, GREEDY), Decision.PROMOTE
    ),
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
    "more cases wanted of one metric": (
        report(measured()), GateSettings(min_cases_of={LOSS: 101}), (LOSS,), Decision.HOLD
    ),
    "applies to too few": (
        report(measured(), measured(GREEDY, n=49, num_left_out=51)), GATE, (LOSS, GREEDY), Decision.HOLD
    ),
    "applies to few, which is enough": (
        report(measured(), measured(GREEDY, n=20, num_left_out=80)), GateSettings(min_cases_of={GREEDY: 20}),
        (LOSS, GREEDY), Decision.PROMOTE,
    ),
    "left out more than there are": (
        report(measured(), measured(GREEDY, n=60, num_left_out=41)), GATE, (LOSS, GREEDY), Decision.HOLD
    ),
    # what is only shown
    "shown metric fell": (
        report(measured(), measured(GREEDY, -0.5, shown_only=True)), GATE, (LOSS, GREEDY), Decision.PROMOTE
    ),
    "shown metric has a problem": (
        report(measured(), unmeasured(GREEDY).model_copy(update={"shown_only": True})), GATE, (LOSS, GREEDY),
        Decision.PROMOTE,
    ),
    "shown metric applies to few": (
        report(measured(), measured(GREEDY, n=2, num_left_out=98, shown_only=True)), GATE, (LOSS, GREEDY),
        Decision.PROMOTE,
    ),
    "shown metric is not there": (report(measured()), GATE, (LOSS, GREEDY), Decision.HOLD),
    "shown metric with a floor": (
        report(measured(), measured(GREEDY, -0.2, shown_only=True)), GateSettings(floors={GREEDY: 0.31}),
        (LOSS, GREEDY), Decision.REJECT,
    ),
    "shown metric above its floor": (
        report(measured(), measured(GREEDY, -0.2, shown_only=True)), GateSettings(floors={GREEDY: 0.29}),
        (LOSS, GREEDY), Decision.PROMOTE,
    ),
    "shown metric with a floor and a problem": (
        report(measured(), unmeasured(GREEDY).model_copy(update={"shown_only": True})),
        GateSettings(floors={GREEDY: 0.1}), (LOSS, GREEDY), Decision.HOLD,
    ),
    "shown metric as primary": (
        report(measured(GREEDY, shown_only=True)), GateSettings(primary=GREEDY), (GREEDY,), Decision.PROMOTE
    ),
    "numbers left out": (report(measured(low=None)), GATE, (LOSS,), Decision.HOLD),
    "mean left out": (report(measured(), measured(GREEDY, candidate=None)), GATE, (LOSS, GREEDY), Decision.HOLD),
    "less sure than the policy wants": (report(measured()), GateSettings(confidence=0.99), (LOSS,), Decision.HOLD),
    # other metrics and floors
    "other metric fell": (report(measured(), measured(GREEDY, -0.06)), GATE, (LOSS, GREEDY), Decision.REJECT),
    "other metric fell a little": (report(measured(), measured(GREEDY, -0.05)), GATE, (LOSS, GREEDY), Decision.PROMOTE),
    "other metric fell by chance, held": (
        report(measured(), measured(GREEDY, -0.06)), GateSettings(on_tie="hold"), (LOSS, GREEDY), Decision.HOLD
    ),
    "other metric surely fell, never held": (
        report(measured(), measured(GREEDY, -0.3)), GateSettings(on_tie="hold"), (LOSS, GREEDY), Decision.REJECT
    ),
    "surely fell among one, not among many": (
        report(measured(), measured(GREEDY, -0.3, guard_low=-0.7, guard_high=0.1)), GateSettings(on_tie="hold"),
        (LOSS, GREEDY), Decision.HOLD,
    ),
    "fell, and the interval ends at zero": (
        report(measured(), measured(GREEDY, -0.1, spread=0.1)), GateSettings(on_tie="hold"), (LOSS, GREEDY),
        Decision.HOLD,
    ),
    "surely fell among many": (
        report(measured(), measured(GREEDY, -0.3, guard_low=-0.5, guard_high=-0.1)), GateSettings(on_tie="hold"),
        (LOSS, GREEDY), Decision.REJECT,
    ),
    "surely fell, but no more than allowed": (
        report(measured(), measured(GREEDY, -0.04, spread=0.01)), GATE, (LOSS, GREEDY), Decision.PROMOTE
    ),
    "broken and too little": (
        report(measured(difference=2e-5, spread=1e-5), measured(GREEDY, -0.3)), GateSettings(on_tie="hold"),
        (LOSS, GREEDY), Decision.REJECT,
    ),
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
    "a loss at its ceiling": (
        report(measured(candidate=0.2)), GateSettings(floors={LOSS: 0.2}), (LOSS,), Decision.PROMOTE
    ),
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
    "perhaps forgets, the interval ends at zero": (
        report(measured(), established=measured(difference=-0.3, spread=0.3, n=20)), GATE, (LOSS,), Decision.PROMOTE
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
    assert all(check.passed for check in verdict.checks) == (expected is Decision.PROMOTE)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


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
    gating = [c for c in seen.comparisons if not c.shown_only or c.metric in {gate.primary, *gate.floors}]
    for c in [*gating, *([seen.established] if seen.established else [])]:
        numbers = (c.candidate, c.baseline, c.difference, c.low, c.high)
        if c.problem is not None or any(x is None or not math.isfinite(x) for x in numbers):
            return False
    few = [c for c in gating if c.n < gate.min_cases_of.get(c.metric, gate.min_cases)]
    if few or any(c.n + c.num_left_out != seen.num_cases for c in gating):
        return False
    primary = by_metric[gate.primary]
    if not ((primary.low or 0.0) > 0.0 and (primary.difference or 0.0) >= gate.min_gain):
        return False
    if primary.p_value is not None and primary.p_value > (1 - gate.confidence) / 2:
        return False
    for c in gating:
        floor = gate.floors.get(c.metric)
        value = c.candidate or 0.0
        if floor is not None and (value < floor if METRICS[c.metric] == "higher" else value > floor):
            return False
        if c.metric != gate.primary and not c.shown_only and (c.difference or 0.0) < -gate.max_drop:
            return False
    old = seen.established
    return old is None or not ((old.high or 0.0) < 0.0 and (old.difference or 0.0) < -gate.max_drop)


def _random_comparison(rng: random.Random, metric: str, num_cases: int) -> Comparison:
    if rng.random() < 0.05:
        return unmeasured(metric, at_fault=rng.choice(["candidate", "evidence"]))
    difference = rng.choice([rng.uniform(-0.2, 0.4), rng.uniform(0.0, 0.4), 0.0, 0.05, -0.05])
    made = measured(metric, difference, rng.choice([0.0, 0.01, 0.1]), n=num_cases)
    if rng.random() < 0.5:
        made = made.model_copy(update={"p_value": rng.choice([0.0005, 0.01, 0.024, 0.2])})
    if rng.random() < 0.2:
        made = made.model_copy(update={"shown_only": True})
    if rng.random() < 0.1:
        left_out = rng.randrange(num_cases + 1)
        made = made.model_copy(update={"n": num_cases - left_out, "num_left_out": left_out})
    if rng.random() < 0.3:
        wider = rng.uniform(0.0, 0.2)
        guarded = {"guard_low": difference - wider, "guard_high": difference + wider}
        made = made.model_copy(update=guarded)
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
            min_gain=rng.choice([0.0, 0.01, 0.05]),
            min_cases_of={rng.choice(list(METRICS)): rng.choice([2, 60])} if rng.random() < 0.2 else {},
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
        assert all(check.passed for check in verdict.checks) == (verdict.decision is Decision.PROMOTE)
        promoted += verdict.decision is Decision.PROMOTE
    assert 400 < promoted < 9_000  # the sample tells something in both directions


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


def test_checks_name_actual_threshold_setting_origin_and_n() -> None:
    seen = report(measured(p_value=0.004), measured(GREEDY, -0.2), established=measured(n=20))
    gate = GateSettings(floors={GREEDY: 0.1}, min_cases_of={GREEDY: 60})
    origins = {"gate.floors.exact_match_greedy": "profiles/dates.yaml:12", "recipe.lr": "--set"}
    told = [
        (c.name, c.metric, None if c.actual is None else round(c.actual, 3), c.needs, c.threshold, c.setting, c.origin,
         c.n, c.passed)
        for c in decide(seen, gate, (LOSS, GREEDY), origins).checks
    ]  # fmt: skip
    assert told == [
        ("confidence", None, 0.95, "≥", 0.95, "gate.confidence", "default", 100, True),
        ("held-out cases", None, 100.0, "≥", 50.0, "gate.min_cases", "default", 100, True),
        ("scored cases", LOSS, 100.0, "≥", 50.0, "gate.min_cases", "default", 100, True),
        ("surely better", LOSS, 0.2, ">", 0.0, "gate.confidence", "default", 100, True),
        ("by chance", LOSS, 0.004, "≤", pytest.approx(0.025), "gate.confidence", "default", 100, True),
        ("gain", LOSS, 0.3, "≥", 0.01, "gate.min_gain", "default", 100, True),
        ("scored cases", GREEDY, 100.0, "≥", 60.0, "gate.min_cases_of.exact_match_greedy", "default", 100, True),
        ("change", GREEDY, -0.2, "≥", -0.05, "gate.max_drop", "default", 100, False),
        ("floor", GREEDY, 0.3, "≥", 0.1, "gate.floors.exact_match_greedy", "profiles/dates.yaml:12", 100, True),
        ("gain on old cases", LOSS, 0.3, "≥", -0.05, "gate.max_drop", "default", 20, True),
    ]


def test_drop_that_may_be_chance_is_marked() -> None:
    """On the established cases it passes, so the number alone would look like a mistake."""
    perhaps = measured(difference=-0.3, spread=0.4, n=20)
    seen = report(measured(), measured(GREEDY, -0.06), measured(SAMPLED, -0.3), established=perhaps)
    checks = decide(seen, GATE, (LOSS, GREEDY, SAMPLED)).checks
    told = [(c.metric, c.passed, c.note) for c in checks if c.setting == "gate.max_drop"]
    chance = "may be chance"
    assert told == [(GREEDY, False, chance), (SAMPLED, False, ""), (LOSS, True, chance)]
    [allowed] = [c for c in decide(report(measured(), measured(GREEDY, -0.05)), GATE, (LOSS, GREEDY)).checks
                 if c.name == "change"]  # fmt: skip
    assert (allowed.passed, allowed.note) == (True, "")
    surely = measured(difference=-0.3, n=20, guard_low=-0.8, guard_high=0.2)  # never corrected: it is the primary one
    [of_old] = [c for c in decide(report(measured(), established=surely), GATE, (LOSS,)).checks if "old" in c.name]
    assert (of_old.passed, of_old.note) == (False, "")


def test_floor_of_a_metric_that_is_better_if_lower_is_shown_as_a_ceiling() -> None:
    checks = decide(report(measured()), GateSettings(floors={LOSS: 0.5}), (LOSS,)).checks
    assert [(c.needs, c.threshold, c.passed) for c in checks if c.name == "floor"] == [("≤", 0.5, True)]


def test_metric_that_was_not_measured_fails_its_checks_without_numbers() -> None:
    checks = decide(report(), GateSettings(floors={GREEDY: 0.1}), (LOSS,)).checks
    failed = [(c.name, c.metric, c.actual, c.passed) for c in checks if c.metric is not None]
    assert failed == [
        ("scored cases", LOSS, 0.0, False), ("surely better", LOSS, None, False), ("gain", LOSS, None, False),
        ("scored cases", GREEDY, 0.0, False), ("change", GREEDY, None, False), ("floor", GREEDY, None, False),
    ]  # fmt: skip


def test_tie_says_how_large_a_gain_must_be_and_how_many_cases_a_smaller_one_needs() -> None:
    seen = report(measured(difference=0.02, spread=0.07, n=60), num_cases=60)
    reasons = decide(seen, GATE, (LOSS,)).reasons
    assert reasons == (
        "no measurable difference: heldout_loss 0.5 → 0.48, improvement +0.02 [-0.05, +0.09] at 95%, n = 60",
        "60 cases usually show a gain of about 0.1 or more; a gain of 0.02 would need about 1,600 held-out cases",
    )
    worse = decide(report(measured(difference=-0.02, spread=0.07)), GATE, (LOSS,)).reasons
    assert worse[1].endswith("a gain of 0.01 would need about 11,000 held-out cases")
    by_chance = decide(report(measured(p_value=0.04)), GATE, (LOSS,)).reasons
    assert by_chance[1] == "100 cases usually show a gain of about 0.14 or more"
    same = decide(report(measured(difference=0.0, spread=0.0)), GATE, (LOSS,)).reasons
    assert len(same) == 1


def test_gain_that_does_not_matter_and_drop_that_may_be_chance_are_said_in_words() -> None:
    small = decide(report(measured(difference=2e-5, spread=1e-5)), GATE, (LOSS,)).reasons
    assert small == (
        "better, but by less than the 0.01 that matters (gate.min_gain): "
        "heldout_loss 0.5 → 0.5, improvement +2e-05 [+1e-05, +3e-05] at 95%, n = 100",
    )
    fell = measured(GREEDY, -0.06, guard_low=-0.2, guard_high=0.08)
    seen = report(measured(), fell, measured(SAMPLED)).model_copy(update={"num_guarded": 2})
    told = decide(seen, GATE, (LOSS, GREEDY, SAMPLED)).reasons
    assert told[0] == (
        "exact_match_greedy fell by 0.060, allowed 0.050; this may be chance: [-0.2, +0.08] with n = 100 and "
        "2 guarded metrics"
    )
    alone = decide(report(measured(), measured(GREEDY, -0.06)), GATE, (LOSS, GREEDY)).reasons
    assert alone[0].endswith("this may be chance: [-0.16, +0.04] with n = 100")
    few = decide(report(measured(), measured(GREEDY, n=9, num_left_out=91)), GATE, (LOSS, GREEDY)).reasons
    assert few == (
        "exact_match_greedy applies to only 9 held-out cases; the gate wants 50 (gate.min_cases); "
        "set gate.min_cases_of.exact_match_greedy to ask for fewer",
    )


def test_too_few_cases_of_a_metric_name_the_setting_that_asks_for_them() -> None:
    own = GateSettings(min_cases_of={GREEDY: 60})
    seen = report(measured(), measured(GREEDY, n=59, num_left_out=41))
    assert decide(seen, own, (LOSS, GREEDY)).reasons == (
        "exact_match_greedy applies to only 59 held-out cases; the gate wants 60 "
        "(gate.min_cases_of.exact_match_greedy)",
    )


def test_verdict_from_before_checks_and_report_from_before_corrections_are_still_read() -> None:
    old = {"decision": "promote", "reasons": ["better"]}
    assert Verdict.model_validate(old).checks == ()
    stored = report(measured(), measured(GREEDY, -0.3), established=measured(n=20)).model_dump(mode="json")
    for one in (*stored["comparisons"], stored["established"]):
        for field in ("guard_low", "guard_high", "p_value", "num_left_out", "shown_only"):
            del one[field]
    del stored["num_guarded"]
    seen = Report.model_validate(stored)
    assert decide(seen, GATE, (LOSS, GREEDY)).decision is Decision.REJECT
    assert decide(seen, GateSettings(max_drop=0.5), (LOSS, GREEDY)).decision is Decision.PROMOTE


def judged(seen: Report, gate: GateSettings, metrics: tuple[str, ...]) -> Judged:
    evidence = Evidence(adapter="a", base="b", cases="c", policy="p", baseline="base")
    return Judged(evidence=evidence, report=seen, verdict=decide(seen, gate, metrics))


def test_evidence_is_missing_only_where_a_held_verdict_has_no_numbers() -> None:
    """A tie, or too few cases of a metric, can be approved by a person; an error cannot."""
    tie = GateSettings(on_tie="hold")
    assert missing_evidence(judged(report(measured(difference=0.0)), tie, (LOSS,)), tie, (LOSS,)) is None
    few = report(measured(), measured(GREEDY, n=2, num_left_out=98))
    held = judged(few, GATE, (LOSS, GREEDY))
    assert held.verdict.decision is Decision.HOLD
    assert missing_evidence(held, GATE, (LOSS, GREEDY)) is None
    nothing = GateSettings(min_cases=101, min_cases_of={LOSS: 101})
    assert missing_evidence(judged(report(measured()), nothing, (LOSS,)), nothing, (LOSS,)) is None
    broken = judged(report(unmeasured()), GATE, (LOSS,))
    assert missing_evidence(broken, GATE, (LOSS,)) == "heldout_loss: no score"
    floored = GateSettings(floors={GREEDY: 0.1})
    absent = judged(report(measured()), floored, (LOSS,))
    assert missing_evidence(absent, floored, (LOSS,)) == "not measured: exact_match_greedy"
    rejected = judged(report(unmeasured(at_fault="candidate")), GATE, (LOSS,))
    assert rejected.verdict.decision is Decision.REJECT
    assert missing_evidence(rejected, GATE, (LOSS,)) is None


@pytest.mark.parametrize(("n", "spread", "told"), [
    (20, 0.0084, "29"), (99, 0.2, "81,000"), (100, 0.01, "210"), (1000, 0.3, "1,900,000")
])  # fmt: skip
def test_cases_that_a_tie_would_need_are_rounded_up_to_two_figures(n: int, spread: float, told: str) -> None:
    seen = report(measured(difference=-0.001, spread=spread, n=n), num_cases=n)
    reasons = decide(seen, GateSettings(min_cases=2), (LOSS,)).reasons
    assert reasons[1].endswith(f"would need about {told} held-out cases")
