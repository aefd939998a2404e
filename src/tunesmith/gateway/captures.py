"""Every finished answer becomes an experience: queued after its last byte, stored by a thread, counted when lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tunesmith.client.capturing import CaptureQueue
from tunesmith.client.session import Session
from tunesmith.domain.experience_policy import CapturePolicy
from tunesmith.errors import NotFound
from tunesmith.gateway.parameters import Asked
from tunesmith.gateway.refusals import ApiError
from tunesmith.store import experiences

SOURCE = "serve"
_MOST_REMEMBERED = 10_000
_MAX_PENDING = 10_000
_LINGER_S = 0.5
Consent = Literal["yes", "no"]


@dataclass(frozen=True)
class About:
    """What the caller says about a request beside the request itself."""

    consent: Consent | None
    session: str | None
    task_type: str | None
    template: str | None

    @classmethod
    def of(cls, headers: Mapping[str, str], asked: Asked) -> About:
        """Headers first, then the body; raises where a consent cannot be understood."""
        said = headers.get("x-tunesmith-consent", "").strip().lower()
        if said not in ("", "yes", "no"):
            raise ApiError(400, "X-Tunesmith-Consent is yes or no", code="invalid_value", param="X-Tunesmith-Consent")
        consent: Consent | None = "no" if said == "no" or asked.store is False else "yes" if said == "yes" else None
        metadata = asked.metadata
        session = headers.get("x-tunesmith-session") or metadata.get("session") or asked.user
        return cls(consent, session or None, metadata.get("task_type") or None, metadata.get("template") or None)


@dataclass(frozen=True)
class _Fate:
    profile: str
    reason: str | None
    """Why it is not kept; None: it was queued."""
    number: int
    """How many were queued up to it."""


class Captures:
    """Remembers for the last answers whether they are kept, and why not, so that feedback can be told."""

    def __init__(self, session: Session) -> None:
        self._queue = CaptureQueue(session, max_pending=_MAX_PENDING, linger_s=_LINGER_S)
        self._fate: OrderedDict[str, _Fate] = OrderedDict()
        self._num_queued = 0

    def keep(
        self,
        key: str,
        profile: str | None,
        policy: CapturePolicy,
        about: About,
        *,
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        served_by: str,
        is_finished: bool,
    ) -> None:
        """Queue one answer, if the profile's policy and the caller allow it; returns at once, never raises."""
        reason = _reason_not_to(policy, about, is_finished, profile)
        if reason is None and profile is not None:
            conversation = [*messages, {"role": "assistant", "content": answer}]
            is_queued = self._queue(
                profile,
                conversation,
                key=key,
                source=SOURCE,
                session=about.session,
                served_by=served_by,
                task_type=about.task_type,
                template=about.template,
            )
            self._num_queued += is_queued
            reason = None if is_queued else "too many answers waited to be kept, and it was dropped"
        self._fate[key] = _Fate(profile or "", reason, self._num_queued)
        while len(self._fate) > _MOST_REMEMBERED:
            self._fate.popitem(last=False)

    def keeps(self, key: str) -> bool:
        """Whether an answer was queued to be kept; only such a one may be shown to a candidate."""
        fate = self._fate.get(key)
        return fate is not None and fate.reason is None

    def knows(self, key: str) -> bool:
        return key in self._fate

    def waits(self, key: str) -> bool:
        """Whether an answer was queued and is neither stored nor given up yet; they are taken in their order."""
        fate, num_queued = self._fate.get(key), self._num_queued
        if fate is None or fate.reason is not None:
            return False
        return num_queued - self._queue.counts.num_pending < fate.number

    def reason_missing(self, key: str) -> str:
        """Why there is no experience of an answer."""
        if key not in self._fate:
            return "no answer with that id was kept; is it of another server, or was it not to be kept?"
        problem = self._queue.counts.last_problem
        return self._fate[key].reason or f"it could not be kept{': ' + problem if problem else ''}"

    def find(self, session: Session, key: str, profiles: Sequence[str]) -> str | None:
        """How the experience of an answer is named (PROFILE:KEY), if there is one; blocks."""
        known = self._fate.get(key)
        with session.database.read() as tx:
            for profile in profiles if known is None else [known.profile]:
                with suppress(NotFound):
                    experiences.find(tx, f"{profile}:{key}")
                    return f"{profile}:{key}"
        return None

    def flush(self, timeout_s: float) -> None:
        """Wait until what is queued is settled; blocks."""
        self._queue.flush(timeout_s)

    def counts(self) -> dict[str, Any]:
        counts = self._queue.counts
        return {**asdict(counts), "num_pending": counts.num_pending}

    def close(self, timeout_s: float) -> None:
        self._queue.close(timeout_s)


def _reason_not_to(policy: CapturePolicy, about: About, is_finished: bool, profile: str | None) -> str | None:
    if profile is None:
        return "answers of `base` belong to no profile and are not kept"
    if not policy.enabled:
        return "the profile keeps nothing (experience.capture.enabled)"
    if about.consent == "no":
        return "the caller asked that it is not kept"
    if policy.consent == "required" and about.consent != "yes":
        return "the profile keeps only answers that come with X-Tunesmith-Consent: yes"
    if policy.finished_only and not is_finished:
        return "the answer was cut short (experience.capture.finished_only)"
    return None
