"""Captures answers after their last byte, where consent and profile allow it; knows why others were not captured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tunesmith.core.clock import utc_now
from tunesmith.core.errors import NotFound
from tunesmith.experience.capture import Capture, capture_of
from tunesmith.experience.capture_queue import CaptureQueue, is_in_captured_share, store_now
from tunesmith.experience.queries import experiences
from tunesmith.profiles.sections.experience import CapturePolicy
from tunesmith.runs.session import Session
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter
from tunesmith.serving.gateway.schemas import CompletionRequest
from tunesmith.serving.gateway.scopes import Caller

SOURCE = "serve"
_MAX_REMEMBERED = 10_000
_MAX_CHARS_HELD = 16 << 20
"""Of conversations in memory: those of the last answers, which a correction may still need."""
_MAX_PENDING = 10_000
_MAX_NAME = 500
"""Of a session, a task type, a template: no experience has a longer one."""
_LINGER_S = 0.5
Consent = Literal["yes", "no"]


@dataclass(frozen=True)
class CaptureOptions:
    """Who sent a request, and what its headers and metadata say about capture."""

    caller: Caller
    consent: Consent | None
    session: str | None
    task_type: str | None
    template: str | None

    @classmethod
    def of(cls, headers: Mapping[str, str], completion: CompletionRequest, caller: Caller) -> CaptureOptions:
        """From the headers, then the body; raises 400 for invalid values."""
        said = headers.get("x-tunesmith-consent", "").strip().lower()
        if said not in ("", "yes", "no"):
            raise ApiError(400, "X-Tunesmith-Consent is yes or no", code="invalid_value", param="X-Tunesmith-Consent")
        consent: Consent | None = (
            "no" if said == "no" or completion.store is False else "yes" if said == "yes" else None
        )
        named = {f"metadata.{name}": completion.metadata.get(name) for name in ("session", "task_type", "template")}
        said_in_header = headers.get("x-tunesmith-session")
        for name, text in {"X-Tunesmith-Session": said_in_header, "user": completion.user, **named}.items():
            if text and (len(text) > _MAX_NAME or not text.isprintable()):
                message = f"must be at most {_MAX_NAME} printable characters"
                raise invalid_parameter(name, message)
        if said_in_header and not said_in_header.isascii():
            raise invalid_parameter(
                "X-Tunesmith-Session", "is not ASCII, as a header must be; send metadata.session instead"
            )
        session = said_in_header or named["metadata.session"] or completion.user
        task_type, template = named["metadata.task_type"], named["metadata.template"]
        return cls(caller, consent, session or None, task_type or None, template or None)


@dataclass(frozen=True)
class _CaptureStatus:
    profile: str
    key_label: str
    reason: str | None
    """Why it was not captured; None: it was queued."""
    number: int
    """The number of answers queued up to this one."""
    is_example: bool
    """Whether the answer may be used for training, or mirrored to a candidate."""


class Captures:
    """Queues answers for capture, and remembers the status of recent ones, so that feedback can explain a missing one.

    Also holds the conversations of recent answers that may be captured: a correction of an answer that is not in the
    store (the profile captures only a share, or the store was unavailable) stores it then.
    """

    def __init__(self, session: Session) -> None:
        self._queue = CaptureQueue(session, max_pending=_MAX_PENDING, linger_s=_LINGER_S)
        self._statuses: OrderedDict[str, _CaptureStatus] = OrderedDict()
        self._held: OrderedDict[str, tuple[int, str, Capture]] = OrderedDict()
        self._chars_held = 0
        self._num_queued = 0
        self._being_written: dict[str, str] = {}
        """By the id of a stream that goes on, the label of the key that reads it."""

    def begin(self, response_id: str, options: CaptureOptions) -> None:
        """A stream has begun. Its reader knows the id and may send feedback before the answer is queued."""
        self._being_written[response_id] = options.caller.label

    def end(self, response_id: str) -> None:
        """The stream has ended and its answers are queued. Safe to call twice."""
        self._being_written.pop(response_id, None)

    def is_being_written(self, response_id: str, caller: Caller) -> bool:
        """Whether this caller reads that answer just now."""
        return caller.owns(self._being_written.get(response_id))

    def keep(
        self,
        key: str,
        profile: str | None,
        policy: CapturePolicy,
        options: CaptureOptions,
        *,
        messages: Sequence[Mapping[str, Any]],
        answer: str,
        served_by: str,
        is_finished: bool,
    ) -> None:
        """Queue one answer, if the profile's policy and the caller allow it; returns at once, never raises."""
        reason = _reason_not_to(policy, options, profile)
        if reason is None and profile is not None:
            conversation = [*messages, {"role": "assistant", "content": answer}]
            about: dict[str, Any] = {
                "key": key,
                "source": SOURCE,
                "session": options.session,
                "served_by": served_by,
                "task_type": options.task_type,
                "template": options.template,
                "captured_at": utc_now(),
                "is_cut": not is_finished,
            }
            self._hold(key, profile, replace(capture_of(conversation, about), key_label=options.caller.label))
            is_queued = self._queue.add_served(profile, conversation, options.caller.label, **about)
            self._num_queued += is_queued
            if not is_queued:
                reason = "the capture queue was full, so it was dropped"
            elif not is_in_captured_share(key, policy.share):
                # the queue's thread drops it for the same share; the reason is kept for feedback
                reason = "the profile captures only a share of its answers (experience.capture.share)"
        self._note(key, options, reason, profile or "", is_example=is_finished or not policy.finished_only)

    def leave_out(self, key: str, options: CaptureOptions, reason: str) -> None:
        """Record why an answer is not captured."""
        self._note(key, options, f"it was not captured: {reason}")

    def _note(
        self, key: str, options: CaptureOptions, reason: str | None, profile: str = "", *, is_example: bool = False
    ) -> None:
        self._statuses[key] = _CaptureStatus(profile, options.caller.label, reason, self._num_queued, is_example)
        while len(self._statuses) > _MAX_REMEMBERED:
            self._statuses.popitem(last=False)

    def _hold(self, key: str, profile: str, capture: Capture) -> None:
        num_chars = sum(200 + sum(len(str(part)) for part in message.values()) for message in capture.messages)
        self._held[key] = (num_chars, profile, capture)
        self._chars_held += num_chars
        while self._chars_held > _MAX_CHARS_HELD:
            _, (num_chars, _, _) = self._held.popitem(last=False)
            self._chars_held -= num_chars

    def keeps(self, key: str) -> bool:
        """Whether an answer was queued to be learnt; only such a one may be shown to a candidate."""
        status = self._statuses.get(key)
        return status is not None and status.reason is None and status.is_example

    def knows(self, key: str, caller: Caller) -> bool:
        """Whether this caller was given that answer a while ago."""
        status = self._statuses.get(key)
        return status is not None and caller.owns(status.key_label)

    def waits(self, key: str) -> bool:
        """Whether an answer was queued and is neither stored nor given up yet; they are taken in their order."""
        status, num_queued = self._statuses.get(key), self._num_queued
        if status is None or status.reason is not None:
            return False
        return num_queued - self._queue.counts.num_pending < status.number

    def reason_missing(self, key: str, caller: Caller) -> str:
        """Why there is no experience of an answer; of other callers' answers it tells nothing."""
        if not self.knows(key, caller):
            return "no captured answer of this API key has this id; it came from another key or server"
        return self._statuses[key].reason or "it could not be stored; see the server log"

    def find(self, session: Session, key: str, profiles: Sequence[str], caller: Caller) -> str | None:
        """How the experience of an answer is named (PROFILE:KEY), if this caller was given it; blocks."""
        known = self._statuses.get(key)
        with session.database.read() as tx:
            for profile in profiles if known is None else [known.profile]:
                with suppress(NotFound):
                    found = experiences.find(tx, f"{profile}:{key}")
                    return f"{profile}:{key}" if caller.owns(found.key_label) else None
        return None

    def store_now(self, session: Session, key: str, caller: Caller) -> str | None:
        """Store an answer that is not in the store, where its conversation is still in memory; its name. Blocks."""
        held = self._held.get(key)
        if held is None or not self.knows(key, caller):
            return None
        _, profile, capture = held
        store_now(session, profile, capture)
        return f"{profile}:{key}"

    def flush(self, timeout_s: float) -> None:
        """Wait until what is queued is settled; blocks."""
        self._queue.flush(timeout_s)

    def counts(self) -> dict[str, Any]:
        counts = self._queue.counts
        return {**asdict(counts), "num_pending": counts.num_pending}

    def close(self, timeout_s: float) -> None:
        self._queue.close(timeout_s)


def _reason_not_to(policy: CapturePolicy, options: CaptureOptions, profile: str | None) -> str | None:
    if profile is None:
        return "answers of `base` belong to no profile and are not captured"
    if not policy.enabled:
        return "capture is disabled for the profile (experience.capture.enabled)"
    if options.consent == "no":
        return "it was not captured: the caller opted out of capture"
    if policy.consent == "required" and options.consent != "yes":
        return "the profile captures only answers to requests with X-Tunesmith-Consent: yes"
    return None
