"""The `curriculum` section of a profile, and its decisions: when a cycle is due, which entries, what it may cost.

Pure: times, counts and sums come in, decisions with reasons go out. Money is in whole millionths of the currency that
the prices are in; a price per million tokens is then exactly the millionths that one token costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from enum import StrEnum
from heapq import nsmallest
from typing import Any

from tunesmith.profiles.sections.curriculum import (
    MILLIONTHS,
    CurriculumPolicy,
    SpendLimits,
    TeacherSettings,
    window_minutes,
)
from tunesmith.verifiers.base import Finding
from tunesmith.verifiers.registry import find_verifier

PURPOSE = "curriculum"
"""Under which its money is booked."""
MAX_BACKOFF = timedelta(days=30)
MAX_ENDPOINT_S = 300.0  # several tries of it are over before a reservation is taken for abandoned
_TOKENS_PER_MESSAGE = 32  # what chat templates put around a message, counted generously


@dataclass(frozen=True)
class Spent:
    """What is spent or reserved, in millionths."""

    cycle: int
    month: int


def refusal_of_spend(most: int, spent: Spent, limits: SpendLimits) -> str | None:
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
class CycleInputs:
    """The inputs of the decision whether a cycle may begin now."""

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
    why_off: str | None = None
    """Why none begins by itself, whatever the moment (see `why_off`)."""


def why_off(policy: CurriculumPolicy, *, has_campaign: bool, problem: str | None) -> str | None:
    """Why no cycle begins by itself, by the settings alone; None: one may.

    `problem`: why no teacher can be asked (`unready`). With `enabled: true` that is an error that a person must see.
    """
    if policy.enabled is False:
        return "curriculum.enabled is false"
    if policy.enabled is True:
        return None
    if problem is not None:
        return f"curriculum.enabled is auto, and {problem}"
    return None if has_campaign else "curriculum.enabled is auto, and the profile has no active campaign"


def waits_for(policy: CurriculumPolicy, moment: CycleInputs) -> list[str]:
    """Everything that keeps a cycle from beginning by itself, in words; empty: it is due."""
    off = "curriculum.enabled is false" if policy.enabled is False else moment.why_off
    found = [] if off is None else [off]
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
    ends = window_minutes(window)
    assert ends is not None, window
    begin, end = ends
    at = _minutes(now.time())
    return begin <= at < end if begin < end else at >= begin or at < end


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
    verifier = find_verifier(name)
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


GIVEN_UP = "given up: correct it by hand, or `curriculum retry`"


def worst(entries: Iterable[Entry], policy: CurriculumPolicy, now: datetime, num: int) -> list[Entry]:
    """The worst that are due, worst first: by their worst verifier, then what people say, then age."""
    due = (entry for entry in entries if not_due(entry, policy, now) is None)
    return nsmallest(num, due, key=_badness)


def _badness(entry: Entry) -> tuple[float, float, int]:
    return worth(entry.findings), 1.0 if entry.feedback_mean is None else entry.feedback_mean, entry.seq


class SpendState(StrEnum):
    RESERVED = "reserved"  # before the call, with the most it may cost
    SETTLED = "settled"  # after it, with what it did cost
