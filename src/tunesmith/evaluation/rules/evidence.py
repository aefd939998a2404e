"""Whether a report holds numbers to decide by. Plain values, so that a listing can ask without building models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Measured(Protocol):
    """One metric on both sides, as `Comparison` has it."""

    @property
    def metric(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def num_left_out(self) -> int: ...
    @property
    def shown_only(self) -> bool: ...
    @property
    def candidate(self) -> float | None: ...
    @property
    def baseline(self) -> float | None: ...
    @property
    def difference(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def at_fault(self) -> str | None: ...


class Measurements(Protocol):
    """Everything the gate looks at, as `Report` has it."""

    @property
    def num_cases(self) -> int: ...
    @property
    def confidence(self) -> float: ...
    @property
    def comparisons(self) -> Sequence[Measured]: ...
    @property
    def established(self) -> Measured | None: ...


@dataclass(frozen=True)
class Unusable:
    """Why the evidence does not allow a comparison at all."""

    reasons: tuple[str, ...]
    is_candidates_fault: bool = False


def find_unusable(
    report: Measurements,
    metrics: Collection[str],
    *,
    decisive: Collection[str],
    confidence: float,
    min_cases: int,
    min_cases_of: Mapping[str, int],
) -> Unusable | None:
    """What keeps a report from being decided by; None where nothing does. `metrics`: all that must be measured.

    A metric that is only shown keeps nothing from being decided, unless it is among the `decisive` ones.
    """
    missing = set(metrics) - {c.metric for c in report.comparisons}
    if missing:
        return Unusable((f"not measured: {', '.join(sorted(missing))}",))
    gating = [c for c in report.comparisons if not c.shown_only or c.metric in decisive]
    measured = (*gating, *([report.established] if report.established is not None else []))
    problems = [c for c in measured if c.problem is not None]
    if problems:
        reasons = tuple(f"{c.metric}: {c.problem}" for c in problems)
        return Unusable(reasons, is_candidates_fault=any(c.at_fault == "candidate" for c in problems))
    incomplete = [c.metric for c in measured if None in (c.candidate, c.baseline, c.difference, c.low, c.high)]
    if incomplete:
        return Unusable((f"numbers are missing: {', '.join(incomplete)}",))
    if report.confidence < confidence:
        return Unusable((f"measured with {report.confidence:.0%} confidence; the gate wants {confidence:.0%}",))
    partial = [c.metric for c in gating if c.n + c.num_left_out != report.num_cases]
    if partial:
        return Unusable((f"measured on a part of the cases: {', '.join(partial)}",))
    if report.num_cases < min_cases:
        return Unusable((f"only {report.num_cases} held-out cases; the gate wants {min_cases} (gate.min_cases)",))
    few = tuple(filter(None, (_too_few(c, min_cases, min_cases_of) for c in gating)))
    return Unusable(few) if few else None


def _too_few(measured: Measured, min_cases: int, min_cases_of: Mapping[str, int]) -> str | None:
    """Why a metric was scored on too few cases; None where there are enough."""
    metric = measured.metric
    own = min_cases_of.get(metric)
    wanted = min_cases if own is None else own
    if measured.n >= wanted:
        return None
    setting = "gate.min_cases" if own is None else f"gate.min_cases_of.{metric}"
    lower = "" if own is not None else f"; set gate.min_cases_of.{metric} to ask for fewer"
    return f"{metric} applies to only {measured.n} held-out cases; the gate wants {wanted} ({setting}){lower}"
