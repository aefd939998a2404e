"""The `curriculum` section of a profile, and its decisions: when a cycle is due, which entries, what it may cost.

Pure: times, counts and sums come in, decisions with reasons go out. Money is in whole millionths of the currency that
the prices are in; a price per million tokens is then exactly the millionths that one token costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from heapq import nsmallest
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from tunesmith.core.section import Section, Share
from tunesmith.verifiers.verifiers import VERIFIERS, Finding

PURPOSE = "curriculum"
"""Under which its money is booked."""
MILLIONTHS = 1_000_000
MAX_BACKOFF = timedelta(days=30)
MAX_ENDPOINT_S = 300.0  # several tries of it are over before a reservation is taken for abandoned
_TOKENS_PER_MESSAGE = 32  # what chat templates put around a message, counted generously
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
    enabled: bool = False
    """Whether workers open cycles by themselves; `tunesmith curriculum run --now` asks nobody."""
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
    bar: Share = 0.9
    """Least score of the teacher's answer under every verifier that decides a class."""
    teacher: TeacherSettings = TeacherSettings()
    """Who answers again."""
    budget: MoneyBudget = MoneyBudget()
    """What it may cost."""

    @field_validator("window")
    @classmethod
    def _a_window(cls, value: str) -> str:
        ends = _ends(value)
        if ends is None or max(ends) > 24 * 60 or ends[0] == ends[1]:
            raise ValueError("must be HH:MM-HH:MM in UTC with two different times, e.g. 22:00-04:00 or 00:00-24:00")
        return value

    @property
    def limits(self) -> Limits:
        return Limits(math.floor(self.budget.per_cycle * MILLIONTHS), math.floor(self.budget.per_month * MILLIONTHS))


@dataclass(frozen=True)
class Limits:
    """The budget, in millionths."""

    per_cycle: int
    per_month: int


@dataclass(frozen=True)
class Spent:
    """What is spent or reserved, in millionths."""

    cycle: int
    month: int


def refusal_of_spend(most: int, spent: Spent, limits: Limits) -> str | None:
    """Why a call that may cost so much is not made; None: the money is there."""
    for name, used, limit in (
        ("per_cycle", spent.cycle, limits.per_cycle),
        ("per_month", spent.month, limits.per_month),
    ):
        if used + most > limit:
            return (
                f"it may cost {money(most)}, and {money(used)} of {money(limit)} is spent "
                f"(curriculum.budget.{name}); raise it, or wait"
            )
    return None


def money(amount: int) -> str:
    """Millionths as people read them."""
    return f"{amount / MILLIONTHS:.6f}".rstrip("0").rstrip(".") if amount % 10_000 else f"{amount / MILLIONTHS:.2f}"


def cost_of(num_in: int, num_out: int, teacher: TeacherSettings) -> int:
    """What so many tokens cost, rounded up to a whole millionth. The prices are known (`unready`)."""
    if teacher.is_free:
        return 0
    assert teacher.price_in is not None and teacher.price_out is not None  # noqa: PT018
    return math.ceil(num_in * teacher.price_in + num_out * teacher.price_out)


def most_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """More tokens than any tokenizer makes of them: one for each byte, and what templates put around a message."""
    sizes = (sum(len(str(value).encode(errors="replace")) for value in message.values()) for message in messages)
    return sum(sizes) + _TOKENS_PER_MESSAGE * (len(messages) + 1)


def unready(policy: CurriculumPolicy, verifiers: Iterable[str]) -> str | None:
    """Why no teacher can be asked with these settings; None: one can."""
    teacher = policy.teacher
    problem = _unready_local(teacher) if teacher.kind == "local" else _unready_endpoint(teacher)
    if problem is not None:
        return f"curriculum.teacher.{problem}"
    if not any(decides(name) for name in verifiers):
        return "experience.verifiers names none that decides a class, so no answer could be seen to be better; name one"
    return None


def _unready_endpoint(teacher: TeacherSettings) -> str | None:
    if teacher.path is not None:
        return "path is of a local teacher, and this one is an endpoint; remove it, or write kind: local"
    for key, value in (("base_url", teacher.base_url), ("model", teacher.model)):
        if value is None:
            return f"{key} is not set; name the teacher"
    for key, price in (("price_in", teacher.price_in), ("price_out", teacher.price_out)):
        if price is None:
            return (
                f"{key} is not set, and an unknown price fits no budget; "
                "write the price of a million tokens, 0 for an endpoint of your own"
            )
    if teacher.timeout_s > MAX_ENDPOINT_S:
        return f"timeout_s is {teacher.timeout_s:g}; an endpoint gets {MAX_ENDPOINT_S:g} s at most"
    return None


def _unready_local(teacher: TeacherSettings) -> str | None:
    if teacher.path is None:
        return "path is not set; name the folder of the local teacher"
    for key, value in (
        ("base_url", teacher.base_url),
        ("model", teacher.model),
        ("api_key_env", teacher.api_key_env),
        ("price_in", teacher.price_in),
        ("price_out", teacher.price_out),
    ):
        if value:
            return f"{key} is of an endpoint, and this teacher is local; remove it"
    return None


def same_as_student(teacher: TeacherSettings, profiles: Iterable[str], base_names: Iterable[str]) -> str | None:
    """Why the teacher is the student itself, by its name: a profile, one of its versions, or the base."""
    model = (teacher.model or "").strip().casefold()
    names = {model, model.rstrip("/").rpartition("/")[2]}
    names |= {name.partition("@")[0] for name in names} | {name.partition(":")[0] for name in names}
    for profile in sorted(profiles):
        if profile.casefold() in names:
            return (
                f"curriculum.teacher.model: {teacher.model!r} is the profile {profile} of this workspace; "
                "a student cannot teach itself: name another model"
            )
    for base in sorted(base_names):
        if base.casefold() in names:
            return (
                f"curriculum.teacher.model: {teacher.model!r} is the base model that the profile tunes; "
                "a student cannot teach itself: name another model"
            )
    return None


@dataclass(frozen=True)
class Moment:
    """What decides whether a cycle may begin now."""

    now: datetime
    last_began_at: datetime | None
    num_due: int
    """How many entries are due, counted up to min_entries."""
    month: int
    """Spent in this month, in millionths."""
    is_stopped: bool = False
    """The e-stop is on."""
    is_open: bool = False
    """A cycle waits or is under way."""


def waits_for(policy: CurriculumPolicy, moment: Moment) -> list[str]:
    """Everything that keeps a cycle from beginning by itself, in words; empty: it is due."""
    found = [] if policy.enabled else ["curriculum.enabled is false"]
    if moment.is_stopped:
        found.append("the e-stop is on")
    if moment.is_open:
        found.append("a cycle is open already")
    if not in_window(policy.window, moment.now):
        found.append(f"its window is {policy.window} UTC, and it is {moment.now:%H:%M}")
    since = None if moment.last_began_at is None else moment.now - moment.last_began_at
    if since is not None and timedelta(0) <= since < timedelta(hours=policy.cooldown_h):
        hours = policy.cooldown_h - since.total_seconds() / 3600
        found.append(f"the last cycle began less than {policy.cooldown_h:g} h ago; {hours:.1f} h to go")
    if moment.num_due < policy.min_entries:
        found.append(f"{moment.num_due} entries are due, curriculum.min_entries is {policy.min_entries}")
    if moment.month >= policy.limits.per_month and policy.limits.per_month and not policy.teacher.is_free:
        found.append(f"{money(moment.month)} is spent this month, all of curriculum.budget.per_month")
    return found


def in_window(window: str, now: datetime) -> bool:
    """Whether the (UTC) time of day lies in it; one that ends before it begins goes over midnight."""
    ends = _ends(window)
    assert ends is not None, window
    begin, end = ends
    at = _minutes(now.time())
    return begin <= at < end if begin < end else at >= begin or at < end


def _ends(window: str) -> tuple[int, int] | None:
    found = _CLOCK.match(window)
    if found is None:
        return None
    hours = [int(part) for part in found.groups()]
    return hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]


def _minutes(at: time) -> int:
    return at.hour * 60 + at.minute


@dataclass(frozen=True)
class Entry:
    """An experience that needs improvement, and what teachers have tried so far."""

    id: str
    seq: int
    findings: Mapping[str, Finding]
    feedback_mean: float | None = None
    num_attempts: int = 0
    """All there were."""
    num_counted: int = 0
    """Those since the last review that count: the teacher answered, or refused to."""
    last_attempt_at: datetime | None = None
    """Since the last review."""
    is_suspect: bool = False
    """A screen found something in it, even if a person has overruled that: its text is sent to nobody."""
    served_by: str | None = None


def decides(name: str) -> bool:
    """Whether a verifier decides a class, and so whether an answer is better."""
    verifier = VERIFIERS.get(name)
    return verifier is not None and not verifier.monitors_only


def worth(findings: Mapping[str, Finding]) -> float:
    """How good an answer is by its worst verifier: 0 where one flags it; 1 where none has anything to say."""
    scores = [
        0.0 if finding.flagged else finding.score
        for name, finding in findings.items()
        if decides(name) and (finding.flagged or finding.score is not None)
    ]
    return min((score for score in scores if score is not None), default=1.0)


def not_due(entry: Entry, policy: CurriculumPolicy, now: datetime) -> str | None:
    """Why an entry waits, or is out for good; None: it is due."""
    if entry.num_counted >= policy.max_attempts:
        return GIVEN_UP
    if entry.is_suspect:
        return "was a suspect: its text is sent to nobody"
    if entry.served_by is not None and entry.served_by == policy.teacher.name:
        return "was answered by this very teacher"
    if worth(entry.findings) >= 1.0:
        return "only people find it poor: no verifier could see a better answer, correct it by hand"
    if entry.last_attempt_at is not None:
        wait = min(timedelta(hours=policy.backoff_h) * 2 ** min(entry.num_attempts - 1, 20), MAX_BACKOFF)
        if timedelta(0) <= now - entry.last_attempt_at < wait:
            return "was tried lately: waits for its next attempt"
    return None


GIVEN_UP = "given up: correct it by hand, or `curriculum again`"


def worst(entries: Iterable[Entry], policy: CurriculumPolicy, now: datetime, num: int) -> list[Entry]:
    """The worst that are due, worst first: by their worst verifier, then what people say, then age."""
    due = (entry for entry in entries if not_due(entry, policy, now) is None)
    return nsmallest(num, due, key=_badness)


def _badness(entry: Entry) -> tuple[float, float, int]:
    return worth(entry.findings), 1.0 if entry.feedback_mean is None else entry.feedback_mean, entry.seq
