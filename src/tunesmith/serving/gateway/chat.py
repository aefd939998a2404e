"""`/v1/chat/completions` and `/v1/completions`: the life of one request, whoever answers it.

Read it, resolve the version, admit it, send what its source says, and capture the answer after the last byte. The
source is the embedded engine or the upstream server of the profile.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.core.logs import logger
from tunesmith.serving.gateway.access import caller_of
from tunesmith.serving.gateway.answers import (
    Choice,
    Header,
    JsonAnswer,
    Receive,
    SseAnswer,
    cancel_on_disconnect,
    choice_key,
    fingerprint_of,
    new_response_id,
)
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.captures import CaptureOptions
from tunesmith.serving.gateway.embedded_source import EmbeddedSource, expand_choices, max_tokens_of
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.interfaces import AnswerSource, Exchange
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.proxy import TOOL_CALLS, ProxiedSource
from tunesmith.serving.gateway.schemas import ChatBody, CompletionRequest, TextBody

log = logger("gateway")


async def chat_completions(request: Request, body: ChatBody) -> Response:
    return await _answer(request, body.request())


async def completions(request: Request, body: TextBody) -> Response:
    return await _answer(request, body.request())


async def _answer(request: Request, completion: CompletionRequest) -> Response:
    gateway: Gateway = request.app.state.gateway
    options = CaptureOptions.of(request.headers, completion, caller_of(request))
    route = await gateway.route_for(completion.model, options.caller)
    body = await request.json()  # as it was sent: an upstream server is sent the same
    if route.served.is_embedded:
        _refuse_extra(completion, body)
    call = CompletionCall(gateway, completion, options, route, body)
    try:
        return await call.answer(request.receive)
    except BaseException as error:
        call.count_failure(error)
        await call.end()
        raise


def _refuse_extra(completion: CompletionRequest, body: Mapping[str, Any]) -> None:
    """Refuse the first parameter that the embedded engine does not support."""
    for name in body:
        if name in completion.extra:
            message = f"{name} is not supported by the embedded engine; leave it out, or serve the profile with vLLM"
            raise ApiError(400, message, code="unsupported_parameter", param=name)


class CompletionCall:
    """One request, from admission to capture."""

    def __init__(
        self,
        gateway: Gateway,
        completion: CompletionRequest,
        options: CaptureOptions,
        route: Route,
        body: Mapping[str, Any],
    ) -> None:
        self._gateway = gateway
        self._completion = completion
        self._options = options
        self._route = route
        self._begun = time.monotonic()
        self._header = Header(
            id=new_response_id(completion.kind),
            kind=completion.kind,
            created=int(time.time()),
            model=route.version.name,
            fingerprint=fingerprint_of(route.version.digest),
            with_log_probs=completion.generation.top_logprobs is not None,
            counts_usage=completion.include_usage,
        )
        adapter = route.adapter
        max_tokens = max_tokens_of(completion, route.served.max_tokens, gateway.settings.max_tokens)
        requests = expand_choices(completion, self._header.id, adapter.name if adapter else None, max_tokens)
        self._choices = [Choice(index, request) for index, request in enumerate(requests)]
        with ExitStack() as held:
            self._admit(held)
            self._source = self._make_source(body)
            self._held = held.pop_all()
        self._bodies = self._source.bodies()
        self._has_ended = False

    def _admit(self, held: ExitStack) -> None:
        route, num_rows = self._route, len(self._choices)
        admission = self._gateway.engines.admission(route.folder if route.served.is_embedded else route.served.base)
        admission.acquire(num_rows)
        held.callback(admission.release, num_rows)
        held.enter_context(self._gateway.router.using(route.version.name))

    def _make_source(self, body: Mapping[str, Any]) -> AnswerSource:
        """Who answers; it adds text and finish reason to `self._choices` as it goes."""
        gateway, route, timeout_s = self._gateway, self._route, self._gateway.settings.timeout_s
        if route.served.is_embedded:
            generate = partial(gateway.generate, route)
            return EmbeddedSource(generate, self._completion, self._header, self._choices, timeout_s)
        upstream, adapter = gateway.upstream_of(route.served), route.version.adapter
        return ProxiedSource(upstream, adapter, body, self._header, self._choices, timeout_s)

    async def answer(self, receive: Receive) -> Response:
        """Waits for the first body, so that an error before it still gets its own status."""
        first = await cancel_on_disconnect(receive, anext(self._bodies))
        if self._completion.stream:
            self._gateway.captures.begin(self._header.id, self._options)
            return SseAnswer(self._events(first), end=self.end, after=self._capture)
        await self.end()
        return JsonAnswer(first, after=lambda: self._capture(True))

    async def _events(self, first: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        yield first
        try:
            async for body in self._bodies:
                yield body
        except Exception as error:
            self.count_failure(error)
            raise

    def count_failure(self, error: BaseException) -> None:
        """Count a request that was admitted and not answered, for the watch; a request that was cancelled is none."""
        route = self._route
        if route.profile is not None and isinstance(error, Exception):
            self._gateway.traffic.failed(route.profile, route.version.name, error)

    async def end(self) -> None:
        """Cancel what is still being answered and release the admitted capacity; idempotent."""
        if not self._has_ended:
            self._has_ended = True
            with self._held:
                await self._bodies.aclose()
                await self._source.close()

    def _capture(self, is_whole: bool) -> None:
        """After the last byte: count, capture and mirror the answer."""
        gateway, route = self._gateway, self._route
        seconds = time.monotonic() - self._begun
        gateway.counts["answers" if is_whole else "broken"] += 1
        log.info(
            "answered" if is_whole else "answer_broken",
            id=self._header.id,
            model=route.version.name,
            seconds=round(seconds, 3),
            key=self._options.caller.label,
        )
        if is_whole and route.profile is not None:
            gateway.traffic.answered(route.profile, route.version.name, seconds)
        for choice in self._choices:
            self._capture_choice(choice, is_whole)
        gateway.captures.end(self._header.id)
        if is_whole and route.profile is not None:
            self._mirror(route.profile, seconds)

    def _capture_choice(self, choice: Choice, is_whole: bool) -> None:
        captures, route = self._gateway.captures, self._route
        key = choice_key(self._header.id, choice.index)
        if choice.finish == TOOL_CALLS:
            captures.leave_out(key, self._options, "answers with tool calls are not captured")
        elif not choice.has_text:
            return  # nothing of it was sent
        elif (messages := choice.conversation) is None:
            captures.leave_out(key, self._options, "the prompt was given as tokens, so its text is unknown")
        else:
            captures.keep(
                key,
                route.profile,
                route.served.capture,
                self._options,
                messages=messages,
                answer=choice.text,
                served_by=route.version.name,
                is_finished=is_whole and choice.ended_by_itself,
            )

    def _mirror(self, profile: str, seconds: float) -> None:
        choice, version = self._choices[0], self._route.version
        messages = choice.conversation
        if messages is None or not self._gateway.captures.keeps(self._header.id):
            return
        exchange = Exchange(
            response_id=self._header.id,
            profile=profile,
            version=version.name,
            digest=version.digest,
            is_live=self._route.is_live,
            request=choice.request,
            messages=messages,
            answer=choice.text,
            finish=choice.finish or "",
            seconds=seconds,
        )
        self._gateway.shadow.answered(exchange)
