"""`quality`: what is live answers worse than when it was new, in several audits in a row."""

from __future__ import annotations

from pydantic import Field

from tunesmith.core.section import Section
from tunesmith.triggers.base import Condition, Trigger, TriggerFacts

MAX_AUDITS = 5


class QualitySettings(Section):
    drop: float = Field(default=0.1, gt=0.0, lt=1.0)
    """How far below the baseline quality must be, as a share of it."""
    audits: int = Field(default=2, ge=1, le=MAX_AUDITS)
    """In how many audits in a row: one bad window may be chance."""


def _look(settings: QualitySettings, facts: TriggerFacts) -> Condition:
    baseline, audits = facts.quality.baseline, facts.quality.audits[-settings.audits :]
    threshold = f"{settings.audits} audits in a row {settings.drop:.0%} below the baseline"
    if baseline is None:
        return Condition("quality", "no baseline yet: too few answers since this version went live", threshold, False)
    told = ", ".join(f"{audit:.3f}" for audit in audits) or "none yet"
    has_dropped = len(audits) == settings.audits and all(audit <= baseline * (1 - settings.drop) for audit in audits)
    # a baseline of 0 cannot drop
    return Condition("quality", f"baseline {baseline:.3f}, audits {told}", threshold, has_dropped and baseline > 0)


TRIGGER = Trigger("quality", "answers got worse than when the live version was new", QualitySettings, _look)
