"""`cron`: a time of a schedule has come since the last round."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from pydantic import field_validator

from tunesmith.core.errors import quoted
from tunesmith.core.section import Section
from tunesmith.triggers.base import Condition, Trigger, TriggerFacts


class CronSettings(Section):
    at: str
    """Five fields of cron (minute hour day month weekday), in `campaign.time_zone`, e.g. `30 3 * * sun`."""

    @field_validator("at")
    @classmethod
    def _a_schedule(cls, value: str) -> str:
        problem = _problem(value)
        if problem is not None:
            raise ValueError(problem)
        return value


def next_after(at: str, moment: datetime, zone: ZoneInfo) -> datetime:
    """The first time of the schedule after a moment, in UTC. Hours that clocks skip or repeat count as in Debian."""
    from cronsim import CronSim  # as few commands as possible pay for it

    return next(CronSim(at, moment.astimezone(zone))).astimezone(UTC)


def _problem(at: str) -> str | None:
    from cronsim import CronSimError

    if len(at.split()) != 5:
        return f"{quoted(at)} must have five fields, minute hour day month weekday, e.g. '30 3 * * sun'"
    try:
        next_after(at, datetime(2024, 1, 1, tzinfo=UTC), ZoneInfo("UTC"))
    except CronSimError as error:
        return f"{quoted(at)} is no schedule ({str(error).lower()}); write e.g. '30 3 * * sun'"
    except StopIteration:
        return f"{quoted(at)} never comes; write a date that exists"
    return None


def _look(settings: CronSettings, facts: TriggerFacts) -> Condition:
    due = next_after(settings.at, facts.waiting_since, facts.zone)
    return Condition("cron", f"{_local(facts.now, facts.zone)}", f"≥ {_local(due, facts.zone)}", due <= facts.now)


def _local(at: datetime, zone: ZoneInfo) -> str:
    return f"{at.astimezone(zone):%Y-%m-%d %H:%M %Z}"


TRIGGER = Trigger("cron", "a time of the schedule has come since the last round", CronSettings, _look)
