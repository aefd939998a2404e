"""The gate: from a report to a verdict with reasons. It fails closed: whatever is missing or odd never promotes."""

from __future__ import annotations

from enum import StrEnum

from tunesmith.core.section import Section
from tunesmith.evaluation.rules.comparison import Comparison, Report
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
    """What a verdict is bound to. If any of it is another by the time of the flip, the verdict does not count."""

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
    """Promote only what is measurably better and nowhere measurably worse than allowed."""
    unusable = _unusable(report, gate, metrics)
    if unusable is not None:
        return unusable
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
    broken = [*_broken_rules(report, gate), *_forgotten(report, gate)]
    if broken:
        return Verdict(decision=Decision.REJECT, reasons=(*broken, f"although better: {line}"))
    return Verdict(decision=Decision.PROMOTE, reasons=(f"better: {line}",))


def missing_evidence(judged: Judged, gate: GateSettings, metrics: tuple[str, ...]) -> str | None:
    """Why there are no numbers that a person could decide by; None where there are.

    A tie, or too few cases, has numbers: a person may look at them and approve.
    """
    if judged.verdict.decision is not Decision.HOLD:
        return None
    unusable = _unusable(judged.report, gate.model_copy(update={"min_cases": 0}), metrics)
    return None if unusable is None else "; ".join(unusable.reasons)


def _unusable(report: Report, gate: GateSettings, metrics: tuple[str, ...]) -> Verdict | None:
    """A verdict when the evidence does not allow a comparison at all."""
    missing = [metric for metric in (*metrics, gate.primary, *gate.floors) if report.of(metric) is None]
    if missing:
        return Verdict(decision=Decision.HOLD, reasons=(f"not measured: {', '.join(sorted(set(missing)))}",))
    measured = (*report.comparisons, *([report.established] if report.established is not None else []))
    problems = [c for c in measured if c.problem is not None]
    if problems:
        reasons = tuple(f"{c.metric}: {c.problem}" for c in problems)
        at_fault = any(c.at_fault == "candidate" for c in problems)
        return Verdict(decision=Decision.REJECT if at_fault else Decision.HOLD, reasons=reasons)
    incomplete = [c.metric for c in measured if None in (c.candidate, c.baseline, c.difference, c.low, c.high)]
    if incomplete:
        return Verdict(decision=Decision.HOLD, reasons=(f"numbers are missing: {', '.join(incomplete)}",))
    if report.confidence < gate.confidence:
        reason = f"measured with {report.confidence:.0%} confidence; the gate wants {gate.confidence:.0%}"
        return Verdict(decision=Decision.HOLD, reasons=(reason,))
    partial = [c.metric for c in report.comparisons if c.n != report.num_cases]
    if partial:
        return Verdict(decision=Decision.HOLD, reasons=(f"measured on a part of the cases: {', '.join(partial)}",))
    if report.num_cases < gate.min_cases:
        reason = f"only {report.num_cases} held-out cases; the gate wants {gate.min_cases} (gate.min_cases)"
        return Verdict(decision=Decision.HOLD, reasons=(reason,))
    return None


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


def _forgotten(report: Report, gate: GateSettings) -> list[str]:
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
