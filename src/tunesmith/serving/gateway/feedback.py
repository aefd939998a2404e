"""`POST /v1/feedback`: a rating, correction or comment on an answer, by the id of its response."""

from __future__ import annotations

import asyncio
import unicodedata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.core.errors import NotFound, StoreError, did_you_mean, quoted
from tunesmith.experience.feedback import RatedView, add_feedback
from tunesmith.serving.gateway.access import caller_of
from tunesmith.serving.gateway.answers import JsonAnswer, choice_key
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter
from tunesmith.serving.gateway.bodies import read_json
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.parameters import MAX_CHOICES
from tunesmith.serving.gateway.scopes import Caller

_FIELDS = {"response_id", "rating", "comment", "correction", "rater", "choice"}
_FRESH_S = 3.0
"""Maximum wait for the capture of an answer that was just sent."""
_RETRY_AFTER_S = 5.0
_MAX_ID = 200
_MOST_AT_ONCE = 16


async def feedback(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    body = await read_json(request.headers, request.receive, gateway.settings.max_body_bytes)
    with gateway.idempotency.entry(request.headers, request.url.path, body) as record:
        return record.answer or record.store(await _stored(gateway, body, caller_of(request)))


async def _stored(gateway: Gateway, body: dict[str, Any], caller: Caller) -> Response:
    said = _checked({name: value for name, value in body.items() if value is not None})
    if gateway.num_rating >= _MOST_AT_ONCE:  # the store is slow, or away: others need threads too
        raise ApiError(
            429, "too much feedback is waiting to be stored; retry later", code="too_many_requests", retry_after_s=2.0
        )
    gateway.feedback_limiter.acquire(caller.label)
    gateway.num_rating += 1
    try:
        rated = await asyncio.to_thread(_rate, gateway, said, caller)
    except StoreError as error:
        raise ApiError(503, error.message, code=error.code, retry_after_s=_RETRY_AFTER_S) from None
    finally:
        gateway.num_rating -= 1
    gateway.counts["feedback"] += 1
    return JsonAnswer(
        {
            "object": "feedback",
            "id": rated.id,
            "response_id": said["response_id"],
            "experience_id": rated.experience_id,
            "is_new": rated.is_new,
            "correction": "correction" in said,
            "class": str(rated.class_name),
        }
    )


def _checked(said: dict[str, Any]) -> dict[str, Any]:
    for name in said:
        if name not in _FIELDS:
            message = f"unknown parameter {quoted(name)}{did_you_mean(name, _FIELDS)}"
            raise ApiError(400, message, code="unknown_parameter", param=name[:100])
    for name in ("response_id", "comment", "correction", "rater"):
        if name in said and not isinstance(said[name], str):
            raise invalid_parameter(name, "must be a string")
    response_id = said.get("response_id", "")
    if not 0 < len(response_id) <= _MAX_ID or not response_id.isprintable():
        raise invalid_parameter("response_id", "must be the id of an answer, such as chatcmpl-…")
    if any(unicodedata.category(char) == "Cc" for char in said.get("rater", "")):
        raise invalid_parameter("rater", "holds a control character; remove it")
    rating = said.get("rating")
    if rating is not None and (isinstance(rating, bool) or not isinstance(rating, str | int | float)):
        raise invalid_parameter("rating", "must be helpful, partial, irrelevant, up, down, or a number from 0 to 1")
    choice = said.setdefault("choice", 0)
    if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < MAX_CHOICES * 16:
        raise invalid_parameter("choice", "must be the index of a choice, from 0")
    return said


def _rate(gateway: Gateway, said: dict[str, Any], caller: Caller) -> RatedView:
    """In a thread: find the experience, wait for a capture in progress, and store the feedback."""
    key = choice_key(said["response_id"], said["choice"])
    is_written = gateway.captures.is_being_written(said["response_id"], caller)  # asked first: it may end meanwhile
    name = _find(gateway, key, caller)
    if name is None and is_written:
        message = f"the answer {quoted(key)} is still being written; send the feedback again when it has ended"
        raise ApiError(503, message, code="not_kept_yet", retry_after_s=_RETRY_AFTER_S)
    if name is None and gateway.captures.knows(key, caller):
        gateway.captures.flush(_FRESH_S)
        waits = gateway.captures.waits(key)  # asked before looking: what is settled by now is there, or never will be
        name = _find(gateway, key, caller)
        if name is None and waits:
            message = f"the answer {quoted(key)} waits to be stored; send the feedback again later"
            raise ApiError(503, message, code="not_kept_yet", retry_after_s=_RETRY_AFTER_S)
        if name is None and "correction" in said:
            name = gateway.captures.store_now(gateway.session, key, caller)
    if name is None:
        reason = gateway.captures.reason_missing(key, caller)
        raise NotFound(f"there is no experience of {quoted(key)}: {reason}")
    return add_feedback(
        gateway.session,
        name,
        said.get("rating"),
        rater=said.get("rater", "client"),
        comment=said.get("comment"),
        correction=said.get("correction"),
        key_label=caller.label,
    )


def _find(gateway: Gateway, key: str, caller: Caller) -> str | None:
    return gateway.captures.find(gateway.session, key, sorted(gateway.router.served_profiles), caller)
