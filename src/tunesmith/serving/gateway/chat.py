"""`/v1/chat/completions` and `/v1/completions`: resolve the version, admit, generate, respond, capture."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.core.logs import logger
from tunesmith.serving.gateway.access import caller_of
from tunesmith.serving.gateway.answers import (
    Choice,
    Header,
    JsonAnswer,
    SseAnswer,
    cancel_on_disconnect,
    choice_key,
    fingerprint_of,
    first_chunk,
    last_chunk,
    new_response_id,
    piece_chunk,
    usage_of,
    whole_choice,
)
from tunesmith.serving.gateway.bodies import read_json
from tunesmith.serving.gateway.captures import CaptureOptions
from tunesmith.serving.gateway.choice_streams import ChoiceStreams, expand_choices, max_tokens_of
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.interfaces import Exchange
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.parameters import CompletionRequest, read_chat, read_completion, refuse_extra
from tunesmith.serving.gateway.proxy import answer_from_upstream
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

log = logger("gateway")


async def chat_completions(request: Request) -> Response:
    return await _answer(request, read_chat)


async def completions(request: Request) -> Response:
    return await _answer(request, read_completion)


async def _answer(request: Request, read: Callable[[dict[str, Any]], CompletionRequest]) -> Response:
    gateway: Gateway = request.app.state.gateway
    gateway.refuse_while_ending()
    body = await read_json(request.headers, request.receive, gateway.settings.max_body_bytes)
    with gateway.idempotency.entry(request.headers, request.url.path, body) as record:
        return record.answer or record.store(await _answer_to(gateway, request, body, read(body)))


async def _answer_to(
    gateway: Gateway, request: Request, body: dict[str, Any], completion: CompletionRequest
) -> Response:
    options = CaptureOptions.of(request.headers, completion, caller_of(request))
    route = await gateway.route_for(completion.model, options.caller)
    if not route.served.is_embedded:
        return await answer_from_upstream(gateway, request, body, completion, options, route)
    refuse_extra(completion)
    call = _CompletionCall(gateway, completion, options, route)
    try:
        if completion.stream:
            return await call.streamed(request)
        return await call.whole(request)
    except BaseException:
        await call.end()
        raise


@dataclass(frozen=True)
class _Row:
    request: GenerationRequest
    choice: Choice


class _CompletionCall:
    """One request on the embedded engine, from admission to capture."""

    def __init__(self, gateway: Gateway, completion: CompletionRequest, options: CaptureOptions, route: Route) -> None:
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
            with_log_probs=completion.top_logprobs is not None,
            counts_usage=completion.include_usage,
        )
        adapter = route.adapter
        max_tokens = max_tokens_of(completion, route.served.max_tokens, gateway.settings.max_tokens)
        requests = expand_choices(completion, self._header.id, adapter.name if adapter else None, max_tokens)
        self._rows = [_Row(row, Choice(number)) for number, row in enumerate(requests)]
        self._held = ExitStack()
        admission = gateway.engines.admission(route.folder)
        admission.acquire(len(requests))
        self._held.callback(admission.release, len(requests))
        self._held.enter_context(gateway.router.using(route.version.name))
        self._streams = ChoiceStreams(
            lambda row: gateway.generate(route, row),
            requests,
            gateway.settings.timeout_s,
            is_buffered=not completion.stream,
        )
        self._has_ended = False

    async def whole(self, request: Request) -> Response:
        async def write() -> None:
            while (item := await self._streams.next()) is not None:
                self._take(*item)

        await cancel_on_disconnect(request.receive, write())
        choices = [row.choice for row in self._rows]
        body = self._header.whole(
            [whole_choice(self._header, choice) for choice in choices], usage_of(choices, self._completion.num_choices)
        )
        await self.end()
        return JsonAnswer(body, after=lambda: self._keep(True))

    async def streamed(self, request: Request) -> Response:
        """Wait for the first delta, so that an error before it still gets its own status."""
        first = await cancel_on_disconnect(request.receive, self._streams.next())
        assert first is not None
        self._gateway.captures.begin(self._header.id, self._options)
        return SseAnswer(self._events(first), end=self.end, after=self._keep)

    async def _events(self, first: tuple[int, TextDelta | GenerationEnd]) -> AsyncGenerator[Mapping[str, Any], None]:
        header, started = self._header, set[int]()
        item: tuple[int, TextDelta | GenerationEnd] | None = first
        while item is not None:
            number, part = item
            choice = self._rows[number].choice
            if header.kind == "chat" and number not in started:
                yield first_chunk(header, number)
            started.add(number)
            if isinstance(part, TextDelta):
                if part.text or part.tokens:
                    yield piece_chunk(header, choice, part.text, part.tokens)
                self._take(number, part)
            else:
                self._take(number, part)
                yield last_chunk(header, choice)
            item = await self._streams.next()
        if self._completion.include_usage:
            choices = [row.choice for row in self._rows]
            yield header.chunk([], usage_of(choices, self._completion.num_choices))

    def _take(self, number: int, part: TextDelta | GenerationEnd) -> None:
        choice = self._rows[number].choice
        if isinstance(part, GenerationEnd):
            choice.end = part
            return
        choice.texts.append(part.text)
        choice.num_chars += len(part.text)
        choice.tokens.extend(part.tokens)

    async def end(self) -> None:
        """Cancel the generation and release the admitted capacity; idempotent."""
        if not self._has_ended:
            self._has_ended = True
            await self._streams.close()
            self._held.close()

    def _keep(self, is_whole: bool) -> None:
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
        for row in self._rows:
            end = row.choice.end
            messages = _conversation(row.request)
            if end is None and not row.choice.text:
                continue  # nothing of it was sent
            key = choice_key(self._header.id, row.choice.index)
            if messages is None:
                gateway.captures.leave_out(key, self._options, "the prompt was given as tokens, so its text is unknown")
                continue
            gateway.captures.keep(
                key,
                route.profile,
                route.served.capture,
                self._options,
                messages=messages,
                answer=row.choice.text,
                served_by=route.version.name,
                is_finished=is_whole and end is not None and end.is_by_itself,
            )
        gateway.captures.end(self._header.id)
        if is_whole and route.profile is not None:
            self._mirror(route.profile, seconds)

    def _mirror(self, profile: str, seconds: float) -> None:
        row = self._rows[0]
        messages = _conversation(row.request)
        if messages is None or row.choice.end is None or not self._gateway.captures.keeps(self._header.id):
            return
        version = self._route.version
        exchange = Exchange(
            response_id=self._header.id,
            profile=profile,
            version=version.name,
            digest=version.digest,
            is_live=self._route.is_live,
            request=row.request,
            messages=messages,
            answer=row.choice.text,
            finish=row.choice.end.finish,
            seconds=seconds,
        )
        self._gateway.shadow.answered(exchange)


def _conversation(row: GenerationRequest) -> list[dict[str, Any]] | None:
    """The messages before the answer; None for a prompt of tokens, whose text is unknown."""
    if row.messages is not None:
        return [dict(message) for message in row.messages]
    return [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else None
