"""Every check of the gate as a row: what was measured, what is needed, which setting says so, and whether it passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from tunesmith.core.section import Section
from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.profiles.sections.evaluation import GateSettings

DEFAULT = "default"
"""Origin of a setting that nobody has set."""
_MAY_BE_CHANCE = "may be chance"


class Check(Section):
    """One condition of a promotion. A candidate is promoted only if every check has passed."""

    name: str
    """What is checked, in words."""
    metric: str | None
    actual: float | None
    """What was measured; None where there are no numbers."""
    needs: Literal["≥", ">", "≤"]
    threshold: float
    setting: str
    """The key that says so, e.g. gate.max_drop."""
    origin: str
    """Who set that key: `default`, or the file and line, the variable, the flag."""
    n: int
    passed: bool
    note: str = ""
    """What the numbers alone do not say."""


def all_checks(report: Report, gate: GateSettings, needed: tuple[str, ...], origins: Mapping[str, str]) -> list[Check]:
    """The checks that this policy makes of a report, in the order in which they are shown."""
    return list(_Checks(report, gate, needed, origins).all())


def is_gating(comparison: Comparison, gate: GateSettings) -> bool:
    """Whether a metric decides anything: a monitor does only if it is the primary one or has a floor."""
    return not comparison.shown_only or comparison.metric == gate.primary or comparison.metric in gate.floors


def is_guarded(comparison: Comparison, gate: GateSettings) -> bool:
    """Whether a metric may not fall by more than `gate.max_drop`."""
    return comparison.metric != gate.primary and not comparison.shown_only


def max_p_value(confidence: float) -> float:
    """Of a gain: the share of one side that the interval leaves outside."""
    return (1 - confidence) / 2


def is_measurably_worse(comparison: Comparison) -> bool:
    """Of a guarded metric: worse even when it is allowed for that several are looked at."""
    high = comparison.high if comparison.guard_high is None else comparison.guard_high
    return high is not None and high < 0.0


def misses_floor(comparison: Comparison, floor: float) -> bool:
    """Whether the candidate is on the wrong side of an absolute floor, or nobody can say."""
    if comparison.candidate is None:
        return True
    match comparison.better:
        case "higher":
            return comparison.candidate < floor
        case "lower":
            return comparison.candidate > floor
        case None:  # an old report: nobody can say, so it does not pass
            return True


def forgets(established: Comparison, gate: GateSettings) -> bool:
    """Whether the primary metric is measurably worse on the established cases, by more than is allowed."""
    high, difference = established.high, established.difference
    return high is not None and difference is not None and high < 0 and difference < -gate.max_drop


class _Checks:
    def __init__(self, report: Report, gate: GateSettings, needed: tuple[str, ...], origins: Mapping[str, str]) -> None:
        self._report, self._gate, self._origins = report, gate, origins
        self._metrics = tuple(dict.fromkeys((gate.primary, *needed, *(c.metric for c in report.comparisons))))

    def all(self) -> Iterator[Check]:
        confidence = self._report.confidence
        yield self._check(
            "confidence",
            None,
            confidence,
            "≥",
            self._gate.confidence,
            "confidence",
            confidence >= self._gate.confidence,
        )
        cases = self._report.num_cases
        yield self._check(
            "held-out cases", None, cases, "≥", self._gate.min_cases, "min_cases", cases >= self._gate.min_cases
        )
        for metric in self._metrics:
            found = self._report.of(metric) or _nothing(metric)
            if is_gating(found, self._gate):
                yield from self._of_metric(found)
        if self._report.established is not None:
            old = self._report.established
            worse = forgets(old, self._gate)
            yield self._change("gain on old cases", old, passed=not worse, is_sure=worse)

    def _of_metric(self, found: Comparison) -> Iterator[Check]:
        gate, metric = self._gate, found.metric
        own = metric in gate.min_cases_of
        fewest, setting = (
            (gate.min_cases_of[metric], f"min_cases_of.{metric}") if own else (gate.min_cases, "min_cases")
        )
        enough = found.n >= fewest and found.n + found.num_left_out == self._report.num_cases and _is_complete(found)
        yield self._check("scored cases", metric, found.n, "≥", fewest, setting, enough, found.n)
        if metric == gate.primary:
            low, p = found.low, found.p_value
            yield self._check(
                "surely better", metric, low, ">", 0.0, "confidence", low is not None and low > 0, found.n
            )
            if p is not None:
                limit = max_p_value(gate.confidence)
                yield self._check("by chance", metric, p, "≤", limit, "confidence", p <= limit, found.n)
            gain = found.difference
            enough = gain is not None and gain >= gate.min_gain
            yield self._check("gain", metric, gain, "≥", gate.min_gain, "min_gain", enough, found.n)
        elif is_guarded(found, gate):
            kept = found.difference is not None and found.difference >= -gate.max_drop
            yield self._change("change", found, passed=kept, is_sure=is_measurably_worse(found))
        floor = gate.floors.get(metric)
        if floor is not None:
            needs: Literal["≥", "≤"] = "≤" if found.better == "lower" else "≥"
            passed = not misses_floor(found, floor)
            yield self._check("floor", metric, found.candidate, needs, floor, f"floors.{metric}", passed, found.n)

    def _change(self, name: str, found: Comparison, *, passed: bool, is_sure: bool) -> Check:
        """A drop is allowed up to `gate.max_drop`; where it is larger and not sure, a note says so."""
        value, threshold = found.difference, -self._gate.max_drop
        whole = passed and _is_complete(found)
        check = self._check(name, found.metric, value, "≥", threshold, "max_drop", whole, found.n)
        is_doubtful = value is not None and value < threshold and not is_sure
        return check.model_copy(update={"note": _MAY_BE_CHANCE}) if is_doubtful else check

    def _check(
        self,
        name: str,
        metric: str | None,
        actual: float | None,
        needs: Literal["≥", ">", "≤"],
        threshold: float,
        setting: str,
        passed: bool,
        n: int | None = None,
    ) -> Check:
        return Check(
            name=name,
            metric=metric,
            actual=actual,
            needs=needs,
            threshold=threshold,
            setting=f"gate.{setting}",
            origin=self._origins.get(f"gate.{setting}", DEFAULT),
            n=self._report.num_cases if n is None else n,
            passed=passed,
        )


def _is_complete(found: Comparison) -> bool:
    numbers = (found.candidate, found.baseline, found.difference, found.low, found.high)
    return found.problem is None and None not in numbers


def _nothing(metric: str) -> Comparison:
    return Comparison(
        metric=metric, n=0, candidate=None, baseline=None, difference=None, low=None, high=None, problem="not measured"
    )
