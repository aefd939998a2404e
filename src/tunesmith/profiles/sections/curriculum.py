"""The `curriculum` section of a profile: when a teacher is asked, which one, and what it may cost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from tunesmith.core.section import Section, Share

MILLIONTHS = 1_000_000
_CLOCK = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)\Z")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,127}\Z")  # in capitals, as people write them: few keys look like that


class TeacherSettings(Section):
    kind: Literal["openai", "local"] = "openai"
    """openai: any endpoint with POST BASE_URL/chat/completions (llama.cpp and vLLM too). local: a model in a folder."""
    base_url: str | None = Field(default=None, max_length=2000)
    """Where it is, e.g. https://api.example.com/v1."""
    model: str | None = Field(default=None, min_length=1, max_length=300)
    """What it is called there; never a profile of this workspace, and never the profile's own base."""
    path: str | None = Field(default=None, min_length=1, max_length=2000)
    """Of a local teacher: its folder in Hugging Face format, with safetensors; relative to the workspace."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; never the key itself. Unset: no key is sent."""
    timeout_s: float = Field(default=60.0, gt=0.0, le=1800.0)
    """Seconds one answer may take in all, connecting included; at most 300 for an endpoint. A local model's loading
    has its own time."""
    max_tokens: int = Field(default=1024, ge=1, le=131_072)
    """Longest answer; one that is cut off there is refused."""
    temperature: float = Field(default=0.2, ge=0.0, le=2.0)
    """Randomness of its answers; 0: the likeliest always."""
    price_in: float | None = Field(default=None, ge=0.0, le=1_000_000.0)
    """Price of a million tokens of prompt; unset is refused. Write 0 for an endpoint of your own; local costs none."""
    price_out: float | None = Field(default=None, ge=0.0, le=1_000_000.0)
    """Price of a million tokens of answer, in the same currency; unset is refused."""

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        # The text may hold a password, so no message repeats it.
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            raise ValueError("is no address; write https://HOST/v1") from None
        if parts.scheme not in ("http", "https") or not has_host or not value.isprintable() or " " in value:
            raise ValueError("must be an address that begins with https:// or http://")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("holds a name, a password, a query or a fragment; keys go into api_key_env")
        return value.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        # Somebody may have written the key itself, so the message does not repeat it.
        if value is not None and not _VARIABLE.match(value):
            raise ValueError("must name an environment variable, in capitals, e.g. TEACHER_API_KEY; never the key")
        return value

    @property
    def name(self) -> str | None:
        """What its answers are stored under: the name of the model, or of a local teacher's folder."""
        if self.kind == "local":
            return None if self.path is None else self.path.rstrip("/").rpartition("/")[2] or self.path
        return self.model

    @property
    def is_free(self) -> bool:
        return self.kind == "local" or (self.price_in == 0 and self.price_out == 0)


class MoneyBudget(Section):
    per_cycle: float = Field(default=1.0, ge=0.0, le=1e9)
    """Most that one cycle may cost, in the currency of the prices."""
    per_month: float = Field(default=10.0, ge=0.0, le=1e9)
    """Most that a calendar month (UTC) may cost, over all cycles of the profile."""


class CurriculumPolicy(Section):
    aliases: ClassVar[Mapping[str, str]] = {"bar": "min_score"}

    enabled: bool | Literal["auto"] = "auto"
    """Whether workers open cycles by themselves; auto: while a campaign is active and the teacher can be asked."""
    min_entries: int = Field(default=10, ge=1, le=10_000)
    """Fewest entries that are due before a cycle begins."""
    max_entries: int = Field(default=20, ge=1, le=10_000)
    """Most entries that one cycle asks the teacher about, the worst first."""
    cooldown_h: float = Field(default=24.0, ge=0.0, le=24 * 365.0)
    """Hours between the beginnings of two cycles."""
    window: str = "02:00-06:00"
    """When a cycle may begin and go on, in UTC: a fleet in several time zones has one night. 00:00-24:00: always."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Answers of the teacher that may be refused before an entry is given up, until a person reviews it."""
    backoff_h: float = Field(default=24.0, ge=0.0, le=24 * 30.0)
    """Hours before an entry is tried again, doubled with every attempt, 30 days at most."""
    min_score: Share = 0.9
    """Minimum score of the teacher's answer under every verifier that decides a class."""
    teacher: TeacherSettings = TeacherSettings()
    """Who answers again."""
    budget: MoneyBudget = MoneyBudget()
    """What it may cost."""

    @field_validator("window")
    @classmethod
    def _a_window(cls, value: str) -> str:
        ends = window_minutes(value)
        if ends is None or max(ends) > 24 * 60 or ends[0] == ends[1]:
            raise ValueError("must be HH:MM-HH:MM in UTC with two different times, e.g. 22:00-04:00 or 00:00-24:00")
        return value

    @property
    def limits(self) -> SpendLimits:
        return SpendLimits(
            math.floor(self.budget.per_cycle * MILLIONTHS), math.floor(self.budget.per_month * MILLIONTHS)
        )


@dataclass(frozen=True)
class SpendLimits:
    """The budget, in millionths."""

    per_cycle: int
    per_month: int


def window_minutes(window: str) -> tuple[int, int] | None:
    found = _CLOCK.match(window)
    if found is None:
        return None
    hours = [int(part) for part in found.groups()]
    return hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
