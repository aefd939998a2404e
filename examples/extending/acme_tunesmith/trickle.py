"""A trigger: a few new experiences are enough, once no round was opened for a week."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field

from tunesmith.core.section import Section
from tunesmith.triggers.base import Condition, Trigger, TriggerFacts


class TrickleSettings(Section):
    count: int = Field(default=20, ge=1)
    """New experiences that are enough."""
    days: float = Field(default=7.0, gt=0.0)
    """After so many days without a round."""


def look(settings: TrickleSettings, facts: TriggerFacts) -> Condition:
    waited = facts.now - facts.waiting_since
    return Condition(
        name="trickle",
        value=f"{facts.new.num} new experiences, {waited / timedelta(days=1):.1f} days without a round",
        threshold=f"≥ {settings.count}, ≥ {settings.days:g} days",
        holds=facts.new.num >= settings.count and waited >= timedelta(days=settings.days),
    )


TRIGGER = Trigger(
    name="trickle",
    says="a few new experiences, and a week without a round",
    settings=TrickleSettings,
    look=look,
)
