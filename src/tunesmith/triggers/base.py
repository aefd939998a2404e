"""The contract of a trigger: facts about a campaign in, one condition with its value and threshold out.

A trigger is pure. It has no state, reads no clock, file or store, and costs microseconds: whatever it needs to know is
in `TriggerFacts`. A trigger opens nothing; it says whether its own reason for a round is there. Whether a round may be
opened at all (window, cooldowns, budget and the rest) is decided in `orchestration/rounds/rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from tunesmith.core.section import Section


@dataclass(frozen=True)
class NewData:
    """Experiences that can be learnt and never were."""

    num: int = 0
    weight: float = 0.0
    """Each counted by its quality: 1 if it is corrected or a person liked it fully, 0.5 if nobody has said anything."""
    oldest_at: datetime | None = None
    """When the oldest of them happened."""


@dataclass(frozen=True)
class LiveQuality:
    """Quality of answers of what is live, in windows of equally many answers: gold 1, ambiguous 0.5, poor 0."""

    baseline: float | None = None
    """Of the first window since this version went live; None: not that many answers yet."""
    audits: tuple[float, ...] = ()
    """Of the last complete windows after the baseline, oldest first."""


@dataclass(frozen=True)
class TriggerFacts:
    """Everything a trigger may depend on."""

    now: datetime
    """UTC, aware."""
    active_since: datetime
    """When the campaign was created or resumed."""
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    """`campaign.time_zone`."""
    last_round_at: datetime | None = None
    """When the campaign's last automatic round was opened."""
    new: NewData = NewData()
    quality: LiveQuality = LiveQuality()

    @property
    def waiting_since(self) -> datetime:
        """The last round, or the campaign's start if that is later; never in the future, whatever clocks did."""
        return min(max(self.last_round_at or self.active_since, self.active_since), self.now)


@dataclass(frozen=True)
class Condition:
    """One line of the answer to "why not now?"."""

    name: str
    value: str
    """What is the case."""
    threshold: str
    """What must be the case."""
    holds: bool
    waived: bool = False
    """It does not hold, and need not: a person asks for the round, or it is the second half of one."""

    @property
    def blocks(self) -> bool:
        return not self.holds and not self.waived


@dataclass(frozen=True)
class Trigger:
    """A kind of trigger by name."""

    name: str
    says: str
    """When it holds, in one line."""
    settings: type[Section]
    """What a profile may say under `campaign.triggers.NAME`; the defaults must be valid, unless a key is required."""
    look: Callable[[Any, TriggerFacts], Condition]
    """(settings, facts) → the condition, whose name is the trigger's."""


def days(span: timedelta) -> str:
    """A span as people read it: hours below two days."""
    hours = span.total_seconds() / 3600
    return f"{hours:.1f} h" if abs(hours) < 48 else f"{hours / 24:.1f} days"
