"""The `campaign` section of a profile: what opens rounds by itself, when it may, where they start, what they may cost.

It holds only while the profile has an active campaign; without one, nothing is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.core.section import Section
from tunesmith.profiles.sections.curriculum import window_minutes
from tunesmith.triggers.base import Trigger
from tunesmith.triggers.registry import TRIGGERS, SettingsError, find_trigger, settings_of

LIVE, BASE, BOTH = "live", "base", "both"
_DAY = 24 * 60
_VERSION = re.compile(r"(?:[a-z0-9][a-z0-9._-]{0,62}@)?v[1-9][0-9]{0,8}\Z")


class CampaignBudget(Section):
    gpu_hours: float | None = Field(default=None, ge=0.0, le=1e9)
    """Most hours that all rounds of a campaign may train and evaluate, times hardware.processes; unset: no limit."""
    money: float | None = Field(default=None, ge=0.0, le=1e9)
    """Most that a campaign may cost: its hours at gpu_hour_price, and what teachers cost meanwhile; unset: no limit."""
    gpu_hour_price: float | None = Field(default=None, ge=0.0, le=1e6)
    """Price of one such hour; with budget.money it must be set, and may be 0 on a machine of your own."""

    @model_validator(mode="after")
    def _price_known(self) -> CampaignBudget:
        if self.money is not None and self.gpu_hour_price is None:
            raise ValueError(
                "campaign.budget.gpu_hour_price: is not set, and an unknown price fits no budget; "
                "write the price of an hour, 0 for a machine of your own"
            )
        return self


class CampaignPolicy(Section):
    triggers: dict[str, Any] = Field(default_factory=lambda: {"new_data": {}, "age": {}, "quality": {}})
    """What opens a round, by name, with settings: {} takes defaults, null leaves one out; any one suffices."""
    window: str = "02:00-06:00"
    """When a round may be opened, in time_zone; may go over midnight. 00:00-24:00: always."""
    time_zone: str = Field(default="UTC", max_length=100)
    """Time zone of window and cron, such as Europe/Berlin."""
    cooldown_h: float = Field(default=12.0, ge=0.0, le=24 * 365.0)
    """Hours between the openings of two automatic rounds."""
    rejection_cooldown_h: float = Field(default=24.0, ge=0.0, le=24 * 365.0)
    """Hours after a round was rejected or rolled back."""
    audit_answers: int = Field(default=100, ge=10, le=100_000)
    """Answers of what is live in one audit of its quality, and in the baseline."""
    start: str = LIVE
    """Where a round starts: live, base, both (one run from each, gated against each other), or a version like v3."""
    refresh_every: int | None = Field(default=5, ge=1, le=1000)
    """Every so many rounds, one starts from base on the accumulated data; null: not for that reason."""
    refresh_after_rejections: int | None = Field(default=2, ge=1, le=1000)
    """So many rejected rounds in a row, and the next starts from base; null: not for that reason."""
    refresh_after_plateau: int | None = Field(default=3, ge=1, le=1000)
    """So many rounds in a row that gained less than 1 %, and the next starts from base; null: not for that reason."""
    max_accumulated: int = Field(default=2000, ge=1, le=1_000_000)
    """Most examples that a round from base trains on: new ones, and what was learnt before, evenly over its age."""
    budget: CampaignBudget = CampaignBudget()
    """What a campaign may cost."""

    @field_validator("start")
    @classmethod
    def _a_start(cls, value: str) -> str:
        if value not in (LIVE, BASE, BOTH) and not _VERSION.match(value):
            raise ValueError(
                f"{quoted(value)} is no start; write live, base, both, or a version of the profile, e.g. v3"
            )
        return value

    @field_validator("window")
    @classmethod
    def _a_window(cls, value: str) -> str:
        ends = window_minutes(value)
        if ends is None or max(ends) > _DAY or ends[0] in (ends[1], _DAY):
            raise ValueError(
                f"{quoted(value)} must be HH:MM-HH:MM with two different times, e.g. 22:00-04:00 or 00:00-24:00"
            )
        return value

    @field_validator("time_zone")
    @classmethod
    def _a_zone(cls, value: str) -> str:
        from zoneinfo import ZoneInfo, available_timezones

        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError):
            zones = available_timezones()
            raise ValueError(f"no time zone {quoted(value)}{did_you_mean(value, zones)}") from None
        return value

    @model_validator(mode="after")
    def _known_triggers(self) -> CampaignPolicy:
        for name, said in self.triggers.items():
            key = f"campaign.triggers.{name}"
            if said is None:
                continue
            if not isinstance(said, Mapping):
                raise ValueError(
                    f"{key}: settings are a mapping; write {{}} to take the defaults, or null to leave it out"
                )
            try:
                settings_of(name, said)
            except SettingsError as error:
                raise ValueError(f"{key}.{error.key}: {error.reason}" if error.key else f"{key}: {error}") from None
        return self

    @property
    def wanted(self) -> list[tuple[Trigger, Section]]:
        """The triggers to ask, each with its settings, ours first; one that is set to null is left out."""
        names = [name for name in TRIGGERS if name in self.triggers] + sorted(set(self.triggers) - set(TRIGGERS))
        said = {name: self.triggers[name] for name in names if self.triggers[name] is not None}
        return [(find_trigger(name), settings_of(name, settings)) for name, settings in said.items()]
