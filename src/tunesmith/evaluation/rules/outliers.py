"""Which examples a base model finds far more surprising than the rest: garbled or foreign text, answers of others.

Only what lies far above the others counts: an example that is easier than the rest is no suspect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from tunesmith.core.errors import UsageError

THRESHOLD = 6.0
MIN_EXAMPLES = 50
"""With fewer examples nobody can say what is usual."""
LARGEST_SHARE = 0.05
"""More than this are not outliers: they are part of what the dataset is."""
_MIN_SPREAD = 0.1
"""In nats per token. Where most losses are nearly the same (a MAD near 0), small differences still mean nothing."""
_NORMAL = 1.4826
"""A MAD times this is the standard deviation, where values are normal."""


class Fit(StrEnum):
    """What can be said about a dataset under its base."""

    JUDGED = "judged"
    TOO_FEW = "too_few"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True)
class OutlierResult:
    """The outliers among the losses of a dataset, and the limit that was applied."""

    fit: Fit
    indices: tuple[int, ...]
    """The outliers, as indices into the losses, the highest loss first."""
    median: float | None
    spread: float | None
    limit: float | None
    """The highest loss that is no outlier. None, like the two above, where nothing can be said about them."""
    reason: str


def find_loss_outliers(losses: Sequence[float], threshold: float = THRESHOLD) -> OutlierResult:
    """Find outliers by the robust z-scores of the examples' mean losses; a loss that is not finite is an outlier."""
    check_threshold(threshold)
    if len(losses) < MIN_EXAMPLES:
        return too_few(len(losses))
    finite = [loss for loss in losses if math.isfinite(loss)]
    middle, spread = _centre(finite) if finite else (None, None)
    limit = None if middle is None or spread is None else middle + threshold * spread
    highest = math.inf if limit is None else limit
    found = [place for place, loss in enumerate(losses) if loss > highest or not math.isfinite(loss)]
    if len(found) > LARGEST_SHARE * len(losses):
        reason = (
            f"{len(found)} of {len(losses)} examples are far more surprising than the rest, more than "
            f"{LARGEST_SHARE:.0%}: the dataset as a whole does not fit the base, and none is called an outlier; "
            "a higher threshold asks for the worst ones only"
        )
        return OutlierResult(Fit.DOES_NOT_FIT, (), middle, spread, limit, reason)
    found.sort(key=lambda place: (-_surprise(losses[place]), place))
    reason = f"{len(found)} of {len(losses)} examples {'is an outlier' if len(found) == 1 else 'are outliers'}"
    return OutlierResult(Fit.JUDGED, tuple(found), middle, spread, limit, reason)


def too_few(num: int) -> OutlierResult:
    reason = f"{num} examples that can be scored are too few to tell what is usual; at least {MIN_EXAMPLES} are needed"
    return OutlierResult(Fit.TOO_FEW, (), None, None, None, reason)


def check_threshold(threshold: float) -> None:
    if not 1.0 <= threshold <= 1000.0:  # NaN is not between them either
        raise UsageError(f"the threshold is {threshold:g}; give one from 1 to 1000, {THRESHOLD:g} unless you know why")


def why(loss: float, verdict: OutlierResult, threshold: float) -> str:
    """What is wrong with an outlier, for a person."""
    if not math.isfinite(loss):
        return f"its loss under the base is {loss}, no finite number"
    assert verdict.median is not None
    assert verdict.spread is not None
    score = (loss - verdict.median) / verdict.spread
    return (
        f"mean loss {loss:.2f} per token under the base, where {verdict.median:.2f} is usual: "
        f"{score:.1f} spreads above it, the threshold is {threshold:g}"
    )


def _centre(finite: Sequence[float]) -> tuple[float, float]:
    """The median and the spread around it. Losses lean to the high side, so that side's own spread counts if larger."""
    middle = median(finite)
    both = median(abs(loss - middle) for loss in finite)
    above = median(loss - middle for loss in finite if loss >= middle)
    return middle, max(_MIN_SPREAD, _NORMAL * both, _NORMAL * above)


def _surprise(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
