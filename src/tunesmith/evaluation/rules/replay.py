"""Replay: what the gate would have decided about a stored report under another policy. Nothing is measured again."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.evaluation.rules.checks import Check
from tunesmith.evaluation.rules.comparison import Report
from tunesmith.evaluation.rules.gate import Decision, decide
from tunesmith.profiles.sections.evaluation import GateSettings


@dataclass(frozen=True)
class Replayed:
    """The verdict under the new policy, and what made it another one."""

    decision: Decision
    reasons: tuple[str, ...]
    changed: tuple[str, ...]
    """Each check that passes under one policy only; without one, settings that decide by themselves."""


def replay(report: Report, old: GateSettings, new: GateSettings, metrics: tuple[str, ...]) -> Replayed:
    """Run the gate once more. `old` is the policy of then, `metrics` what had to be measured then."""
    before, after = decide(report, old, metrics), decide(report, new, metrics)
    return Replayed(after.decision, after.reasons, _changed(before.checks, after.checks, old, new))


def why_not_replayable(report: Report, new: GateSettings) -> str | None:
    """Why the stored numbers cannot answer for a policy; None if they can."""
    missing = sorted(metric for metric in {new.primary, *new.floors} if report.of(metric) is None)
    if missing:
        return f"{', '.join(missing)} was not measured"
    if report.confidence != new.confidence:
        return (
            f"its intervals are for {report.confidence:.0%} confidence; "
            f"gate.confidence {new.confidence:g} needs others, so it must be measured again"
        )
    old_cases = report.established
    if old_cases is not None and old_cases.metric != new.primary:
        return f"on the established cases only {old_cases.metric} was compared, not {new.primary}"
    return None


def _changed(
    before: tuple[Check, ...], after: tuple[Check, ...], old: GateSettings, new: GateSettings
) -> tuple[str, ...]:
    known = {(check.name, check.metric): check for check in before}
    said = []
    for check in after:
        was = known.pop((check.name, check.metric), None)
        if was is None:
            if not check.passed:
                said.append(f"{_told(check)} (not asked then)")
        elif was.passed != check.passed:
            said.append(f"{_told(check)} (then {was.needs} {was.threshold:g})")
    said += [f"{_of(check)} is not asked any more" for check in known.values() if not check.passed]
    if not said and old.on_tie != new.on_tie:
        said.append(f"gate.on_tie is {new.on_tie} (then {old.on_tie})")
    return tuple(said)


def _told(check: Check) -> str:
    actual = "none" if check.actual is None else f"{check.actual:.4g}"
    return f"{_of(check)} is {actual}, needs {check.needs} {check.threshold:g}"


def _of(check: Check) -> str:
    return check.name if check.metric is None else f"{check.metric} {check.name}"
