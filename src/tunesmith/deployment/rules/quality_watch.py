"""What the live answers of a fresh deployment say: wait for more, good enough, or roll back, always with the evidence.

Each signal compares the answers of the new version with those of the version before, from before the flip. All signals
and all looks of one watch share one error probability (`watch.quality.confidence`): each signal gets an equal part of
it, and the test of a signal is valid however often somebody looks (`drop_test`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tunesmith.deployment.rules.drop_test import Counts, DropTest, has_low_mean, mean_of, num_of
from tunesmith.profiles.sections.watch import QualityWatch

FINISHED, FEEDBACK, ERRORS, LATENCY = "finished", "feedback", "errors", "latency"
FEWEST = 10
"""Values of the new version before a signal may roll back: three failures in a row may have one cause that is over."""
_SAID = {
    FINISHED: "the share of answers that ended by themselves",
    FEEDBACK: "the mean rating",
    ERRORS: "the share of requests that were answered",
}


@dataclass(frozen=True)
class AnswerWindow:
    """Answers of one version in one stretch of time."""

    version: str
    num_answers: int = 0
    """Captured ones."""
    verifiers: Mapping[str, Counts] = field(default_factory=dict)
    """Scores of each verifier that decides classes; monitors are left out."""
    finished: Counts = field(default_factory=dict)
    """1 for an answer that ended by itself, 0 for one that was cut short or is empty."""
    feedback: Counts = field(default_factory=dict)
    """The mean rating of each rated answer."""
    requests: Counts = field(default_factory=dict)
    """1 for a request that was answered, 0 for one that failed; also those that were not captured."""
    seconds: Mapping[float, int] = field(default_factory=dict)
    """How many answers took up to so many seconds; the keys are upper bounds of narrow ranges."""


@dataclass(frozen=True)
class SignalEvidence:
    """One signal on both sides of the flip. Of `latency`, the means are medians in seconds."""

    signal: str
    baseline_version: str
    baseline_mean: float
    baseline_n: int
    live_version: str
    live_mean: float
    live_n: int
    bound: float
    """The mean has fallen by at least this much; of latency: answers take at least so many times as long."""
    allowed: float
    """`max_drop`, of latency `max_slowdown`."""
    alpha: float
    """This signal's part of the error probability."""
    rolls_back: bool

    @property
    def text(self) -> str:
        """The evidence in one sentence."""
        sure = f"{1 - self.alpha:.1%} sure at any number of looks"
        if self.signal == LATENCY:
            before, now = _seconds(self.baseline_mean), _seconds(self.live_mean)
            return (
                f"the median answer took {before} ({self.baseline_n} answers of {self.baseline_version} before the "
                f"flip), and takes {now} ({self.live_n} of {self.live_version}): more than {self.allowed:g} times as "
                f"long, {sure}"
            )
        what = _SAID.get(self.signal, f"the mean score of {self.signal}")
        unit = "requests" if self.signal == ERRORS else "answers"
        before = f"{self.baseline_mean:.3f} ({self.baseline_n} {unit} of {self.baseline_version} before the flip)"
        now = f"{self.live_mean:.3f} ({self.live_n} of {self.live_version})"
        if not self.rolls_back:
            return f"{what} was {before} and is {now}: no drop of more than {_points(self.allowed)} is shown"
        return f"{what} fell from {before} to {now}: by at least {_points(self.bound)}, {sure}"

    def as_json(self) -> dict[str, Any]:
        """For the event of the run; a mean of nothing is null."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {**asdict(self), "text": self.text}.items()
        }


@dataclass(frozen=True)
class QualityVerdict:
    decision: Literal["again", "healthy", "roll_back"]
    reason: str
    evidence: tuple[SignalEvidence, ...] = ()
    """Every signal that was compared; those that roll back first, the largest drop in front."""


def judge(before: AnswerWindow, live: AnswerWindow, watched_s: float, policy: QualityWatch) -> QualityVerdict:
    """Decide on everything seen so far. Nothing to compare with is healthy, and says so; a shown drop rolls back."""
    if not policy.enabled:
        return QualityVerdict("healthy", "answers are not compared (watch.quality.enabled)")
    compared = _compared(before, live, policy)
    if not compared:
        num = max([0, *(num_of(counts) for counts in _signals(before, policy).values())])
        return QualityVerdict(
            "healthy",
            f"not enough answers to compare with: {num} of {policy.min_answers} by {before.version} before the flip",
        )
    dropped = sorted((each for each in compared if each.rolls_back), key=_how_bad, reverse=True)
    evidence = (*dropped, *(each for each in compared if not each.rolls_back))
    if dropped:
        others = f"; also worse: {', '.join(each.signal for each in dropped[1:])}" if dropped[1:] else ""
        return QualityVerdict("roll_back", f"{dropped[0].text}{others}", evidence)
    # with a small experience.capture.share there are many requests to count and few answers to compare
    has_captured = before.num_answers >= policy.min_answers
    num = live.num_answers if has_captured else max(each.live_n for each in compared)
    return _unless_over(live, num, watched_s, policy, evidence)


def _unless_over(
    live: AnswerWindow, num: int, watched_s: float, policy: QualityWatch, evidence: tuple[SignalEvidence, ...]
) -> QualityVerdict:
    if num >= policy.answers and watched_s >= policy.min_s:
        return QualityVerdict("healthy", f"no drop shown in {num} answers of {live.version}", evidence)
    if watched_s >= policy.max_s:
        if num < policy.min_answers:
            said = f"not enough answers to compare: {num} of {policy.min_answers} by {live.version}"
        else:
            said = f"no drop shown in {num} answers of {live.version}, fewer than watch.quality.answers"
        return QualityVerdict("healthy", said, evidence)
    wanted = f"{num} of {policy.answers} answers, {min(watched_s, policy.min_s):.0f} of {policy.min_s:.0f} s"
    return QualityVerdict("again", f"no drop shown yet: {wanted}", evidence)


def _signals(window: AnswerWindow, policy: QualityWatch) -> dict[str, Counts]:
    """The values of every signal that is wanted, by name; those of latency are compared in their own way."""
    found: dict[str, Counts] = dict(window.verifiers) if "verifiers" in policy.signals else {}
    others = {FINISHED: window.finished, FEEDBACK: window.feedback, ERRORS: window.requests}
    return found | {name: counts for name, counts in others.items() if name in policy.signals}


def _compared(before: AnswerWindow, live: AnswerWindow, policy: QualityWatch) -> Sequence[SignalEvidence]:
    """The evidence of every signal that has enough values before the flip."""
    baselines, values = _signals(before, policy), _signals(live, policy)
    # Which verifiers there are was written before the flip, so how the error is split does not depend on live answers.
    num_signals = len(baselines) + (LATENCY in policy.signals)
    alpha = (1.0 - policy.confidence) / max(1, num_signals)
    found = [
        _mean_evidence(name, before.version, baseline, live.version, values.get(name, {}), policy.max_drop, alpha)
        for name, baseline in baselines.items()
        if num_of(baseline) >= policy.min_answers
    ]
    if LATENCY in policy.signals and sum(before.seconds.values()) >= policy.min_answers:
        found.append(_latency_evidence(before, live, policy.max_slowdown, alpha))
    return found


def _mean_evidence(
    name: str, before: str, baseline: Counts, version: str, live: Counts, max_drop: float, alpha: float
) -> SignalEvidence:
    test = DropTest(baseline, live)
    rolls_back = num_of(live) >= FEWEST and test.has_dropped(max_drop, alpha)
    return SignalEvidence(
        signal=name,
        baseline_version=before,
        baseline_mean=mean_of(baseline),
        baseline_n=num_of(baseline),
        live_version=version,
        live_mean=mean_of(live),
        live_n=num_of(live),
        bound=test.least_drop(alpha) if rolls_back else 0.0,
        allowed=max_drop,
        alpha=alpha,
        rolls_back=rolls_back,
    )


def _latency_evidence(before: AnswerWindow, live: AnswerWindow, ratio: float, alpha: float) -> SignalEvidence:
    """Whether more than half of the live answers take longer than `ratio` times the median of before.

    Half of alpha is for that median: it is taken as high as the window before allows (Hoeffding's bound).
    """
    num = sum(before.seconds.values())
    share = 0.5 + math.sqrt(math.log(2.0 / alpha) / (2.0 * num))
    limit = ratio * _quantile(before.seconds, share) if share < 1.0 else math.inf
    slow = sum(times for seconds, times in live.seconds.items() if seconds > limit)
    num_live = sum(live.seconds.values())
    fast = {name: times for name, times in ((0.0, slow), (1.0, num_live - slow)) if times}
    return SignalEvidence(
        signal=LATENCY,
        baseline_version=before.version,
        baseline_mean=_quantile(before.seconds, 0.5),
        baseline_n=num,
        live_version=live.version,
        live_mean=_quantile(live.seconds, 0.5),
        live_n=num_live,
        bound=ratio,
        allowed=ratio,
        alpha=alpha,
        rolls_back=num_live >= FEWEST and has_low_mean(fast, 0.5, alpha / 2),
    )


def _quantile(seconds: Mapping[float, int], share: float) -> float:
    """The least upper bound with at least this share of the answers below it; NaN of none."""
    needed, seen = share * sum(seconds.values()), 0
    for bound in sorted(seconds):
        seen += seconds[bound]
        if seen >= needed:
            return bound
    return max(seconds, default=math.nan)


def _how_bad(evidence: SignalEvidence) -> float:
    """The surest and largest drop first; a slow answer is still an answer."""
    return 0.0 if evidence.signal == LATENCY else evidence.bound


def _points(drop: float) -> str:
    return f"{100 * drop:.1f}".removesuffix(".0") + " points"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s"
