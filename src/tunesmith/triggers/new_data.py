"""`new_data`: enough experiences that were never learnt, counted, or weighted by their quality."""

from __future__ import annotations

from pydantic import Field

from tunesmith.core.section import Section
from tunesmith.triggers.base import Condition, Trigger, TriggerFacts


class NewDataSettings(Section):
    count: int = Field(default=100, ge=1, le=10_000_000)
    """How many there must be."""
    weighted: bool = False
    """Count each by its quality: 1 for corrected or fully liked, 0.5 where nobody has said anything."""


def _look(settings: NewDataSettings, facts: TriggerFacts) -> Condition:
    have = facts.new.weight if settings.weighted else float(facts.new.num)
    unit = "new experiences, weighted by quality" if settings.weighted else "new experiences"
    return Condition("new_data", f"{have:g} {unit}", f"≥ {settings.count}", have >= settings.count)


TRIGGER = Trigger("new_data", "enough experiences were never learnt", NewDataSettings, _look)
