"""`POST /v1/feedback`: a rating, correction or comment on an answer, by the id of its response."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.core.errors import NotFound, StoreError, quoted
from tunesmith.experience.feedback import RatedView, add_feedback
from tunesmith.serving.gateway.access import caller_of
from tunesmith.serving.gateway.answers import JsonAnswer, choice_key
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.schemas import FeedbackBody
from tunesmith.serving.gateway.scopes import Caller

_FRESH_S = 3.0
"""Maximum wait for the capture of an answer that was just sent."""
_RETRY_AFTER_S = 5.0
_MAX_AT_ONCE = 16


async def feedback(request: Request, body: FeedbackBody) -> Response:
    gateway: Gateway = request.app.state.gateway
    caller = caller_of(request)
    if gateway.num_rating >= _MAX_AT_ONCE:  # the store is slow, or away: others need threads too
        raise ApiError(
            429, "too much feedback is waiting to be stored; retry later", code="too_many_requests", retry_after_s=2.0
        )
    gateway.feedback_limiter.acquire(caller.label)
    gateway.num_rating += 1
    try:
        rated = await asyncio.to_thread(_rate, gateway, body, caller)
    except StoreError as error:
        raise ApiError(503, error.message, code=error.code, retry_after_s=_RETRY_AFTER_S) from None
    finally:
        gateway.num_rating -= 1
    gateway.counts["feedback"] += 1
    return JsonAnswer(
        {
            "object": "feedback",
            "id": rated.id,
            "response_id": body.response_id,
            "experience_id": rated.experience_id,
            "is_new": rated.is_new,
            "correction": body.correction is not None,
            "class": str(rated.class_name),
        }
    )


def _rate(gateway: Gateway, body: FeedbackBody, caller: Caller) -> RatedView:
    """In a thread: find the experience, wait for a capture in progress, and store the feedback."""
    key = choice_key(body.response_id, body.choice)
    is_written = gateway.captures.is_being_written(body.response_id, caller)  # asked first: it may end meanwhile
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
        if name is None and body.correction is not None:
            name = gateway.captures.store_now(gateway.session, key, caller)
    if name is None:
        reason = gateway.captures.reason_missing(key, caller)
        raise NotFound(f"there is no experience of {quoted(key)}: {reason}")
    return add_feedback(
        gateway.session,
        name,
        body.rating,
        rater="client" if body.rater is None else body.rater,
        comment=body.comment,
        correction=body.correction,
        key_label=caller.label,
    )


def _find(gateway: Gateway, key: str, caller: Caller) -> str | None:
    return gateway.captures.find(gateway.session, key, sorted(gateway.router.served_profiles), caller)
