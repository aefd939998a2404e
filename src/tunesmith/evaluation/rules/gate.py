"""The gate: from a report to a verdict with reasons. It fails closed: whatever is missing or odd never promotes."""

from __future__ import annotations

from enum import StrEnum

from tunesmith.core.section import Section
from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.evaluation.rules.evidence import find_unusable
from tunesmith.profiles.profile import GateSettings

BARE_BASE = "base"  # what is live when no adapter is


class Decision(StrEnum):
    PROMOTE = "promote"
    HOLD = "hold"
    REJECT = "reject"


class Verdict(Section):
    decision: Decision
    reasons: tuple[str, ...]


class Evidence(Section):
    """What a verdict is bound to. If any of these has changed by the time of the flip, the verdict does not count."""

    adapter: str
    base: str
    cases: str
    policy: str
    baseline: str
    """Digest of the adapter that was live, or `base`."""
    references: str | None = None
    """sha256 of what the candidate answered in the trainer's stack; None where the evaluator left that out."""


class Judged(Section):
    """An evaluation, complete: what it is bound to, what was measured, what follows."""

    evidence: Evidence
    report: Report
    verdict: Verdict


def decide(report: Report, gate: GateSettings, metrics: tuple[str, ...]) -> Verdict:
    """Promote only what is measurably better and nowhere measurably worse than allowed.

    Differences are turned so that positive is better, whichever way the metric goes; `low` and `high` are the ends of
    the interval.
    """
    unusable = find_unusable(report, _needed(gate, metrics), confidence=gate.confidence, min_cases=gate.min_cases)
    if unusable is not None:
        decision = Decision.REJECT if unusable.is_candidates_fault else Decision.HOLD
        return Verdict(decision=decision, reasons=unusable.reasons)
    primary = report.of(gate.primary)
    assert primary is not None
    assert primary.low is not None
    assert primary.high is not None
    line = describe(primary, report.confidence)
    if primary.high < 0:
        return Verdict(decision=Decision.REJECT, reasons=(f"worse: {line}",))
    if primary.low <= 0:
        decision = Decision.HOLD if gate.on_tie == "hold" else Decision.REJECT
        return Verdict(decision=decision, reasons=(f"no measurable difference: {line}",))
    broken = [*_broken_rules(report, gate), *_worse_on_established(report, gate)]
    if broken:
        return Verdict(decision=Decision.REJECT, reasons=(*broken, f"although better: {line}"))
    return Verdict(decision=Decision.PROMOTE, reasons=(f"better: {line}",))


def missing_evidence(judged: Judged, gate: GateSettings, metrics: tuple[str, ...]) -> str | None:
    """Why there are no numbers that a person could decide by; None where there are.

    A tie, or too few cases, has numbers: a person may look at them and approve.
    """
    if judged.verdict.decision is not Decision.HOLD:
        return None
    unusable = find_unusable(judged.report, _needed(gate, metrics), confidence=gate.confidence, min_cases=0)
    return None if unusable is None else "; ".join(unusable.reasons)


def _needed(gate: GateSettings, metrics: tuple[str, ...]) -> tuple[str, ...]:
    return (*metrics, gate.primary, *gate.floors)


def _broken_rules(report: Report, gate: GateSettings) -> list[str]:
    broken = []
    for comparison in report.comparisons:
        assert comparison.candidate is not None
        assert comparison.difference is not None
        metric = comparison.metric
        if metric != gate.primary and comparison.difference < -gate.max_drop:
            broken.append(f"{metric} fell by {-comparison.difference:.3f}, allowed {gate.max_drop:.3f}")
        floor = gate.floors.get(metric)
        if floor is not None and _misses(comparison, comparison.candidate, floor):
            broken.append(f"{metric} is {comparison.candidate:.3f}, floor {floor:.3f}")
    return broken


def _worse_on_established(report: Report, gate: GateSettings) -> list[str]:
    """New data must not be learnt at the cost of what was proven before, however well it fits the new data."""
    old = report.established
    if old is None or old.high is None or old.difference is None:
        return []
    if old.high < 0 and old.difference < -gate.max_drop:
        return [f"worse on the established cases: {describe(old, report.confidence)}"]
    return []


def _misses(comparison: Comparison, value: float, floor: float) -> bool:
    match comparison.better:
        case "higher":
            return value < floor
        case "lower":
            return value > floor
        case None:  # an old report: nobody can say, so it does not pass
            return True


def describe(comparison: Comparison, confidence: float) -> str:
    """One comparison as a sentence for people."""
    if comparison.problem is not None:
        return f"{comparison.metric}: {comparison.problem}"
    return (
        f"{comparison.metric} {comparison.baseline:.4g} → {comparison.candidate:.4g}, improvement "
        f"{comparison.difference:+.3g} [{comparison.low:+.3g}, {comparison.high:+.3g}] "
        f"at {confidence:.0%}, n = {comparison.n}"
    )
