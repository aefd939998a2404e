"""What the mirrored answers of a candidate say: enough and good enough, not good enough, or wait for more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunesmith.core.ids import is_in_share
from tunesmith.evaluation.rules.comparison import paired_interval
from tunesmith.experience.rules.shadow import Observed, ShadowOutcome
from tunesmith.profiles.sections.shadow import ShadowSettings

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Shadowed:
    """Everything there is to decide on."""

    observed: Sequence[Observed]
    mirroring_s: float
    """Since the first of them; wall time."""
    waiting_s: float
    """Since the candidate began to shadow; wall time."""


@dataclass(frozen=True)
class ShadowVerdict:
    decision: Literal["again", "passed", "failed"]
    reason: str


def judge(seen: Shadowed, policy: ShadowSettings, seed: int) -> ShadowVerdict:
    """Fewer answers than `min_count`, or less time than `min_s`, never suffice; nor does what cannot be told apart."""
    num = len(seen.observed)
    if num < max(1, policy.min_count) or seen.mirroring_s < policy.min_s:
        said = f"{num} of {policy.min_count} mirrored answers, {seen.mirroring_s:.0f} of {policy.min_s:.0f} s"
        return _unless_late(seen, policy, said)
    failed = sum(each.outcome is not ShadowOutcome.ANSWERED for each in seen.observed)
    if failed / num > policy.max_failures:
        return ShadowVerdict(
            "failed",
            f"{failed} of {num} mirrored requests failed or timed out, more than shadow.max_failures "
            f"({policy.max_failures:.1%})",
        )
    return _by_flags(seen, policy, seed)


def _by_flags(seen: Shadowed, policy: ShadowSettings, seed: int) -> ShadowVerdict:
    """Pair by pair: how much smaller the share without a flag is than that of what is live."""
    pairs = [each for each in seen.observed if each.outcome is ShadowOutcome.ANSWERED]
    if not pairs:
        return ShadowVerdict("failed", "none of the mirrored requests was answered")
    differences = [float(each.live_is_flagged) - float(each.is_flagged) for each in pairs]
    low, high = paired_interval(differences, _CONFIDENCE, seed)
    mean = sum(differences) / len(differences)
    said = (
        f"{len(pairs)} mirrored answers: share without a flag {mean:+.1%} against live "
        f"(interval {low:+.1%} … {high:+.1%}, allowed −{policy.max_drop:.1%})"
    )
    if low >= -policy.max_drop:
        return ShadowVerdict("passed", said)
    if high < -policy.max_drop:
        return ShadowVerdict("failed", said)
    return _unless_late(seen, policy, f"cannot be told yet: {said}")


def _unless_late(seen: Shadowed, policy: ShadowSettings, said: str) -> ShadowVerdict:
    if seen.waiting_s >= policy.max_s:
        return ShadowVerdict("failed", f"not enough within shadow.max_s ({policy.max_s:.0f} s): {said}")
    return ShadowVerdict("again", said)


def is_mirrored(response_id: str, share: float) -> bool:
    """Whether a request belongs to the share that is mirrored: the same id always does, or never."""
    return is_in_share(f"shadow {response_id}", share)
