"""Requests of a proxied profile (vLLM, llama.cpp, Ollama): forwarded, streamed back, captured."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.serving.gateway.answers import (
    JsonAnswer,
    SseAnswer,
    cancel_on_disconnect,
    choice_key,
    fingerprint_of,
    new_response_id,
)
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.captures import CaptureOptions
from tunesmith.serving.gateway.choice_streams import expand_choices, max_tokens_of
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.interfaces import Exchange
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.parameters import CompletionRequest, Kind
from tunesmith.serving.generation import GenerationRequest, was_cut

_PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
_OURS = ("metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields for the gateway only; not forwarded."""


async def answer_from_upstream(
    gateway: Gateway,
    request: Request,
    body: dict[str, Any],
    completion: CompletionRequest,
    options: CaptureOptions,
    route: Route,
) -> Response:
    proxied = _ProxiedRequest(gateway, completion, options, route, body)
    try:
        return await proxied.answer(request)
    except BaseException:
        await proxied.end()
        raise


class _ProxiedRequest:
    """One forwarded request, from admission to capture."""

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
        self._id = new_response_id(completion.kind)
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._finish: dict[int, str] = {}
        self._cut: set[int] = set()
        """Choices that a stop sequence of the caller may have ended."""
        self._held = ExitStack()
        admission = gateway.engines.admission(route.served.base)
        admission.acquire(completion.num_rows)
        self._held.callback(admission.release, completion.num_rows)
        self._held.enter_context(gateway.router.using(route.version.name))
        sent = {name: value for name, value in body.items() if name not in _OURS and value is not None}
        limit = "max_completion_tokens" if "max_completion_tokens" in sent else "max_tokens"
        self._max_tokens = max_tokens_of(completion, route.served.max_tokens, gateway.settings.max_tokens)
        sent[limit] = self._max_tokens
        upstream = gateway.upstream_of(route.served)
        self._chunks: AsyncIterator[dict[str, Any]] = upstream.ask(_PATHS[completion.kind], sent, route.version.adapter)
        self._deadline = self._begun + gateway.settings.timeout_s

    async def answer(self, request: Request) -> Response:
        first = await cancel_on_disconnect(request.receive, self._next())
        if first is None:
            raise EngineError("the upstream server gave no answer", code="upstream", http_status=502)
        if self._completion.stream:
            self._gateway.captures.begin(self._id, self._options)
            return SseAnswer(self._events(first), end=self.end, after=self._keep)
        body = self._with_our_names(first)
        self._collect(body)
        await self.end()
        return JsonAnswer(body, after=lambda: self._keep(True))

    async def _next(self) -> dict[str, Any] | None:
        try:
            if (left_s := self._deadline - time.monotonic()) <= 0:  # a slow reader holds capacity
                raise TimeoutError
            async with asyncio.timeout(left_s):
                return await anext(self._chunks, None)
        except TimeoutError:
            message = f"the answer took longer than serve.timeout_s ({self._gateway.settings.timeout_s:g} s)"
            raise ApiError(504, message, code="timeout") from None

    async def _events(self, first: dict[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        chunk: dict[str, Any] | None = first
        while chunk is not None:
            chunk = self._with_our_names(chunk)
            self._collect(chunk)
            yield chunk
            chunk = await self._next()

    def _with_our_names(self, body: dict[str, Any]) -> dict[str, Any]:
        version = self._route.version
        named = {"id": self._id, "model": version.name, "system_fingerprint": fingerprint_of(version.digest)}
        return {**body, **named}

    def _collect(self, body: Mapping[str, Any]) -> None:
        """Collect texts and finish reasons for capture; every field of the upstream server is checked."""
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if not isinstance(choice, dict) or not isinstance(index := choice.get("index", 0), int):
                continue
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text = said.get("content") if isinstance(said, dict) else None
            if isinstance(text, str):
                self._texts[index].append(text)
            if isinstance(said, dict) and said.get("tool_calls"):
                self._finish[index] = "tool_calls"
            elif isinstance(choice.get("finish_reason"), str):
                self._finish.setdefault(index, choice["finish_reason"])
                if was_cut(choice, has_stops=bool(self._completion.stop)):
                    self._cut.add(index)

    async def end(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            with suppress(Exception):
                await close()
        self._held.close()

    def _keep(self, is_whole: bool) -> None:
        """Capture answers that are text; tool calls are not captured."""
        gateway, route = self._gateway, self._route
        gateway.counts["answers" if is_whole else "broken"] += 1
        rows = expand_choices(self._completion, self._id, None, self._max_tokens)
        for index, texts in sorted(self._texts.items()):
            finish = self._finish.get(index, "")
            if not 0 <= index < len(rows):
                continue
            key = choice_key(self._id, index)
            if finish == "tool_calls":
                gateway.captures.leave_out(key, self._options, "answers with tool calls are not captured")
                continue
            row = rows[index]
            messages = [dict(m) for m in row.messages] if row.messages is not None else []
            if isinstance(row.prompt, str):
                messages = [{"role": "user", "content": row.prompt}]
            if not messages:
                gateway.captures.leave_out(key, self._options, "the prompt was given as tokens, so its text is unknown")
                continue
            gateway.captures.keep(
                key,
                route.profile,
                route.served.capture,
                self._options,
                messages=messages,
                answer="".join(texts),
                served_by=route.version.name,
                is_finished=is_whole and finish == "stop" and index not in self._cut,
            )
            if index == 0 and is_whole and route.profile is not None and gateway.captures.keeps(self._id):
                exchange = Exchange(
                    response_id=self._id,
                    profile=route.profile,
                    version=route.version.name,
                    digest=route.version.digest,
                    is_live=route.is_live,
                    request=row,
                    messages=messages,
                    answer="".join(texts),
                    finish=finish,
                    seconds=time.monotonic() - self._begun,
                )
                gateway.shadow.answered(exchange)
        gateway.captures.end(self._id)


async def whole_from_upstream(gateway: Gateway, route: Route, request: GenerationRequest) -> str:
    """The complete answer to a mirrored request; it is never sent to a client."""
    body: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "stop": list(request.stop) or None,
        "seed": request.seed,
    }
    sent = {name: value for name, value in body.items() if value is not None}
    kind: Kind = "chat" if request.messages is not None else "text"
    sent |= {"messages": [dict(m) for m in request.messages or ()]} if kind == "chat" else {"prompt": request.prompt}
    texts: list[str] = []
    async for answer in gateway.upstream_of(route.served).ask(_PATHS[kind], sent, route.version.adapter):
        choice = (answer.get("choices") or [{}])[0]
        said = choice.get("message") or {"content": choice.get("text")}
        texts.append(str(said.get("content") or ""))
    return "".join(texts)
