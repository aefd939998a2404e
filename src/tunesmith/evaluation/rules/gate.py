"""The gate: from a report to a verdict with reasons. It fails closed: whatever is missing or odd never promotes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tunesmith.core.section import Section
from tunesmith.evaluation.rules.checks import (
    Check,
    all_checks,
    forgets,
    is_guarded,
    is_measurably_worse,
    max_p_value,
    misses_floor,
)
from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.evaluation.rules.evidence import Unusable, find_unusable
from tunesmith.evaluation.rules.significance import cases_needed, smallest_visible_gain
from tunesmith.profiles.sections.evaluation import GateSettings

BARE_BASE = "base"  # what is live when no adapter is


class Decision(StrEnum):
    PROMOTE = "promote"
    HOLD = "hold"
    REJECT = "reject"


class Verdict(Section):
    decision: Decision
    reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    """Every check with what was measured and what is needed; empty in verdicts from before they were stored."""


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


def decide(
    report: Report, gate: GateSettings, metrics: tuple[str, ...], origins: Mapping[str, str] | None = None
) -> Verdict:
    """Promote only what is measurably better by enough to matter, and nowhere worse than allowed.

    Differences are turned so that positive is better, whichever way the metric goes; `low` and `high` are the ends of
    the interval. `origins` say who set a key of the policy; the checks of the verdict name them.
    """
    checks = tuple(all_checks(report, gate, (*metrics, *gate.floors), origins or {}))
    unusable = _unusable(report, gate, metrics, gate.min_cases, gate.min_cases_of)
    if unusable is not None:
        decision = Decision.REJECT if unusable.is_candidates_fault else Decision.HOLD
        return Verdict(decision=decision, reasons=unusable.reasons, checks=checks)
    decision, reasons = _compare(report, gate)
    return Verdict(decision=decision, reasons=reasons, checks=checks)


def _compare(report: Report, gate: GateSettings) -> tuple[Decision, tuple[str, ...]]:
    """From numbers that are all there."""
    primary = report.of(gate.primary)
    assert primary is not None
    assert primary.low is not None
    assert primary.high is not None
    assert primary.difference is not None
    line = describe(primary, report.confidence)
    if primary.high < 0:
        return Decision.REJECT, (f"worse: {line}",)
    undecided = Decision.HOLD if gate.on_tie == "hold" else Decision.REJECT
    by_chance = primary.p_value is not None and primary.p_value > max_p_value(gate.confidence)
    if primary.low <= 0 or by_chance:
        return undecided, (f"no measurable difference: {line}", *_power_hint(primary, report.confidence, gate.min_gain))
    broken = [*_broken_rules(report, gate), *_worse_on_established(report, gate)]
    if broken:
        return Decision.REJECT, (*broken, f"although better: {line}")
    doubtful = _doubtful_drops(report, gate)
    if doubtful:
        return undecided, (*doubtful, f"although better: {line}")
    if primary.difference < gate.min_gain:
        return undecided, (f"better, but by less than the {gate.min_gain:g} that matters (gate.min_gain): {line}",)
    return Decision.PROMOTE, (f"better: {line}",)


def missing_evidence(judged: Judged, gate: GateSettings, metrics: tuple[str, ...]) -> str | None:
    """Why there are no numbers that a person could decide by; None where there are.

    A tie, or too few cases, has numbers: a person may look at them and approve.
    """
    if judged.verdict.decision is not Decision.HOLD:
        return None
    unusable = _unusable(judged.report, gate, metrics, 0, {})
    return None if unusable is None else "; ".join(unusable.reasons)


def _unusable(
    report: Report, gate: GateSettings, metrics: tuple[str, ...], min_cases: int, min_cases_of: Mapping[str, int]
) -> Unusable | None:
    decisive = (gate.primary, *gate.floors)
    return find_unusable(
        report,
        (*metrics, *decisive),
        decisive=decisive,
        confidence=gate.confidence,
        min_cases=min_cases,
        min_cases_of=min_cases_of,
    )


def _power_hint(primary: Comparison, confidence: float, min_gain: float) -> tuple[str, ...]:
    """How large a gain must be to be seen with so many cases, and how many cases a smaller one needs."""
    assert primary.low is not None
    assert primary.high is not None
    assert primary.difference is not None
    if primary.high <= primary.low:
        return ()
    visible = smallest_visible_gain(primary.low, primary.high, confidence)
    said = f"{primary.n} cases usually show a gain of about {visible:.2g} or more"
    gain = max(primary.difference, min_gain)
    if not 0.0 < gain < visible:
        return (said,)
    needed = cases_needed(primary.n, primary.low, primary.high, confidence, gain)
    return (f"{said}; a gain of {gain:.2g} would need about {_rounded(needed)} held-out cases",)


def _rounded(count: int) -> str:
    """Two digits that count: nobody can know more."""
    scale = 10 ** max(0, len(str(count)) - 2)
    return f"{-(-count // scale) * scale:,}"


def _broken_rules(report: Report, gate: GateSettings) -> list[str]:
    broken = []
    for comparison in report.comparisons:
        metric, floor = comparison.metric, gate.floors.get(comparison.metric)
        if _falls(comparison, gate) and is_measurably_worse(comparison):
            broken.append(_fell(comparison, gate))
        if floor is not None and misses_floor(comparison, floor):
            broken.append(f"{metric} is {comparison.candidate:.3f}, floor {floor:.3f}")
    return broken


def _doubtful_drops(report: Report, gate: GateSettings) -> list[str]:
    """Drops that are larger than allowed and may be chance. They do not promote either: it may be unsafe."""
    return [
        f"{_fell(c, gate)}; this may be chance: {_guard_interval(c)} with n = {c.n}{_together(report)}"
        for c in report.comparisons
        if _falls(c, gate) and not is_measurably_worse(c)
    ]


def _falls(comparison: Comparison, gate: GateSettings) -> bool:
    difference = comparison.difference
    return is_guarded(comparison, gate) and difference is not None and difference < -gate.max_drop


def _fell(comparison: Comparison, gate: GateSettings) -> str:
    assert comparison.difference is not None
    return f"{comparison.metric} fell by {-comparison.difference:.3f}, allowed {gate.max_drop:.3f}"


def _guard_interval(comparison: Comparison) -> str:
    if comparison.guard_high is None:  # an older report
        return f"[{comparison.low:+.3g}, {comparison.high:+.3g}]"
    return f"[{comparison.guard_low:+.3g}, {comparison.guard_high:+.3g}]"


def _together(report: Report) -> str:
    return f" and {report.num_guarded} guarded metrics" if report.num_guarded > 1 else ""


def _worse_on_established(report: Report, gate: GateSettings) -> list[str]:
    """New data must not be learnt at the cost of what was proven before, however well it fits the new data."""
    old = report.established
    if old is None or not forgets(old, gate):
        return []
    return [f"worse on the established cases: {describe(old, report.confidence)}"]


def describe(comparison: Comparison, confidence: float) -> str:
    """One comparison as a sentence for people."""
    if comparison.problem is not None:
        return f"{comparison.metric}: {comparison.problem}"
    return (
        f"{comparison.metric} {comparison.baseline:.4g} → {comparison.candidate:.4g}, improvement "
        f"{comparison.difference:+.3g} [{comparison.low:+.3g}, {comparison.high:+.3g}] "
        f"at {confidence:.0%}, n = {comparison.n}"
    )
