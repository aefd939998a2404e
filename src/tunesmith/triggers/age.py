"""`age`: the oldest experience that was never learnt, or the last round, is too long ago."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from tunesmith.core.section import Section
from tunesmith.triggers.base import Condition, Trigger, TriggerFacts, days


class AgeSettings(Section):
    days: float = Field(default=30.0, gt=0.0, le=3650.0)
    """How long ago it must be."""
    of: Literal["data", "round"] = "data"
    """data: the oldest experience that was never learnt; round: the last automatic round, or the campaign's start."""


def _look(settings: AgeSettings, facts: TriggerFacts) -> Condition:
    threshold = f"≥ {days(timedelta(days=settings.days))}"
    since = facts.new.oldest_at if settings.of == "data" else facts.waiting_since
    if since is None:
        return Condition("age", "nothing new", threshold, False)
    what = "oldest new experience" if settings.of == "data" else "last round"
    age = facts.now - since
    return Condition("age", f"{what} {days(age)} ago", threshold, age >= timedelta(days=settings.days))


TRIGGER = Trigger("age", "new data, or the last round, is too old", AgeSettings, _look)
