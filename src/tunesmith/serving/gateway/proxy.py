"""Requests of a profile that another server answers (vLLM, llama.cpp, Ollama): passed on, streamed through, kept."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.serving.gateway.answers import choice_key, fingerprint_of, new_response_id
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.captures import About
from tunesmith.serving.gateway.choice_streams import limit_of, rows_of
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.interfaces import Exchange
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.parameters import Asked, Kind
from tunesmith.serving.gateway.responses import JsonAnswer, SseAnswer, while_there
from tunesmith.serving.generation import GenerationRequest, was_cut

_PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
_OURS = ("metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key")
"""About us and our caller; of no use to who answers."""


async def answer_from_upstream(
    gateway: Gateway, request: Request, body: dict[str, Any], asked: Asked, about: About, route: Route
) -> Response:
    passing = _Passing(gateway, asked, about, route, body)
    try:
        return await passing.answer(request)
    except BaseException:
        await passing.end()
        raise


class _Passing:
    """One request on its way through."""

    def __init__(self, gateway: Gateway, asked: Asked, about: About, route: Route, body: Mapping[str, Any]) -> None:
        self._gateway = gateway
        self._asked = asked
        self._about = about
        self._route = route
        self._begun = time.monotonic()
        self._id = new_response_id(asked.kind)
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._finish: dict[int, str] = {}
        self._cut: set[int] = set()
        """Which answers a stop of the caller may have ended."""
        self._held = ExitStack()
        room = gateway.engines.room(route.place.base)
        room.enter(asked.num_rows)
        self._held.callback(room.leave, asked.num_rows)
        self._held.enter_context(gateway.switchboard.using(route.version.name))
        sent = {name: value for name, value in body.items() if name not in _OURS and value is not None}
        limit = "max_completion_tokens" if "max_completion_tokens" in sent else "max_tokens"
        self._max_tokens = limit_of(asked, route.place.max_tokens, gateway.settings.max_tokens)
        sent[limit] = self._max_tokens
        upstream = gateway.upstream_of(route.place)
        self._chunks: AsyncIterator[dict[str, Any]] = upstream.ask(_PATHS[asked.kind], sent, route.version.adapter)
        self._deadline = self._begun + gateway.settings.timeout_s

    async def answer(self, request: Request) -> Response:
        first = await while_there(request.receive, self._next())
        if first is None:
            raise EngineError("the server behind gave no answer", code="upstream", http_status=502)
        if self._asked.stream:
            self._gateway.captures.begin(self._id, self._about)
            return SseAnswer(self._events(first), end=self.end, after=self._keep)
        body = self._renamed(first)
        self._note(body)
        await self.end()
        return JsonAnswer(body, after=lambda: self._keep(True))

    async def _next(self) -> dict[str, Any] | None:
        try:
            if (left_s := self._deadline - time.monotonic()) <= 0:  # a slow reader holds a place
                raise TimeoutError
            async with asyncio.timeout(left_s):
                return await anext(self._chunks, None)
        except TimeoutError:
            message = f"the answer took longer than serve.timeout_s ({self._gateway.settings.timeout_s:g} s)"
            raise ApiError(504, message, code="timeout") from None

    async def _events(self, first: dict[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        chunk: dict[str, Any] | None = first
        while chunk is not None:
            chunk = self._renamed(chunk)
            self._note(chunk)
            yield chunk
            chunk = await self._next()

    def _renamed(self, body: dict[str, Any]) -> dict[str, Any]:
        version = self._route.version
        named = {"id": self._id, "model": version.name, "system_fingerprint": fingerprint_of(version.digest)}
        return {**body, **named}

    def _note(self, body: Mapping[str, Any]) -> None:
        """What was said, for whoever keeps it; a server may send anything, so nothing is taken for granted."""
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
                if was_cut(choice, has_stops=bool(self._asked.stop)):
                    self._cut.add(index)

    async def end(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            with suppress(Exception):
                await close()
        self._held.close()

    def _keep(self, is_whole: bool) -> None:
        """Answers with texts only: what a tool was called with is not kept yet."""
        gateway, route = self._gateway, self._route
        gateway.counts["answers" if is_whole else "broken"] += 1
        rows = rows_of(self._asked, self._id, None, self._max_tokens)
        for index, texts in sorted(self._texts.items()):
            finish = self._finish.get(index, "")
            if not 0 <= index < len(rows):
                continue
            key = choice_key(self._id, index)
            if finish == "tool_calls":
                gateway.captures.leave_out(key, self._about, "answers that call tools are not kept")
                continue
            row = rows[index]
            messages = [dict(m) for m in row.messages] if row.messages is not None else []
            if isinstance(row.prompt, str):
                messages = [{"role": "user", "content": row.prompt}]
            if not messages:
                gateway.captures.leave_out(key, self._about, "the prompt was given as tokens, whose text is unknown")
                continue
            gateway.captures.keep(
                key,
                route.profile,
                route.place.capture,
                self._about,
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
                    asked=row,
                    messages=messages,
                    answer="".join(texts),
                    finish=finish,
                    seconds=time.monotonic() - self._begun,
                )
                gateway.shadow.answered(exchange)
        gateway.captures.end(self._id)


async def whole_from_upstream(gateway: Gateway, route: Route, asked: GenerationRequest) -> str:
    """The whole answer to a mirrored request; nobody sees it."""
    body: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "stop": list(asked.stop) or None,
        "seed": asked.seed,
    }
    sent = {name: value for name, value in body.items() if value is not None}
    kind: Kind = "chat" if asked.messages is not None else "text"
    sent |= {"messages": [dict(m) for m in asked.messages or ()]} if kind == "chat" else {"prompt": asked.prompt}
    texts: list[str] = []
    async for answer in gateway.upstream_of(route.place).ask(_PATHS[kind], sent, route.version.adapter):
        choice = (answer.get("choices") or [{}])[0]
        said = choice.get("message") or {"content": choice.get("text")}
        texts.append(str(said.get("content") or ""))
    return "".join(texts)
