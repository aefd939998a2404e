"""A campaign: a profile running continuously; its breaker counts failures, never rejections."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from tunesmith.core.states import Transitions


class CounterEffect(StrEnum):
    """What the end of a run does to its campaign's counters."""

    SUCCESS = "success"  # closes the breaker
    REJECTION = "rejection"  # its own cooldown; never the breaker
    FAILURE = "failure"  # breaker + 1
    NONE = "none"


class CampaignState(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"
    ARCHIVED = "archived"


C = CampaignState

CAMPAIGN = Transitions(
    "campaign",
    {
        C.ACTIVE: frozenset({C.PAUSED}),
        C.PAUSED: frozenset({C.ACTIVE, C.ARCHIVED}),
        C.ARCHIVED: frozenset(),
    },
)

FAILURES_TO_OPEN = 3
FAILURES_FORGOTTEN_AFTER = timedelta(days=7)
BREAKER_COOLDOWN = timedelta(hours=6)


class Breaker(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # the cooldown is over: one run may try


@dataclass(frozen=True)
class Counters:
    """How the campaign's runs have ended, as far as the next one depends on it."""

    failures: tuple[datetime, ...] = field(default=())
    num_rejections: int = 0
    last_rejected_at: datetime | None = None
    last_success_at: datetime | None = None


def after_end(counters: Counters, effect: CounterEffect, now: datetime) -> Counters:
    """The counters after a run ended with that effect."""
    match effect:
        case CounterEffect.SUCCESS:
            return replace(counters, failures=(), num_rejections=0, last_success_at=now)
        case CounterEffect.REJECTION:
            return replace(counters, num_rejections=counters.num_rejections + 1, last_rejected_at=now)
        case CounterEffect.FAILURE:
            recent = recent_failures(counters.failures, now)
            return replace(counters, failures=(*recent, now))
        case CounterEffect.NONE:
            return counters


def breaker(counters: Counters, now: datetime) -> Breaker:
    """Whether automatic runs may be opened."""
    recent = recent_failures(counters.failures, now)
    if len(recent) < FAILURES_TO_OPEN:
        return Breaker.CLOSED
    return Breaker.OPEN if is_within(BREAKER_COOLDOWN, recent[-1], now) else Breaker.HALF_OPEN


def is_within(cooldown: timedelta, at: datetime | None, now: datetime) -> bool:
    """Whether something happened so lately that its cooldown lasts.

    A clock that was set back shows it in the future: near enough, it still counts; further off, that clock was wrong.
    """
    return at is not None and abs(now - at) < cooldown


def recent_failures(failures: tuple[datetime, ...], now: datetime) -> tuple[datetime, ...]:
    """Those that are not forgotten."""
    return tuple(at for at in failures if now - at < FAILURES_FORGOTTEN_AFTER)
