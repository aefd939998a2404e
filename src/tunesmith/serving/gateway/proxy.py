"""Answers of a proxied profile (vLLM, llama.cpp, Ollama): the request is forwarded, the answer passed on as it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.serving.gateway.answers import Choice, Header
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.interfaces import Upstream
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.schemas import Kind
from tunesmith.serving.generation import GenerationRequest, was_cut

TOOL_CALLS = "tool_calls"
_PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
_OURS = (
    *("metadata", "store", "user", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields for the gateway only; not forwarded."""


class ProxiedSource:
    """Implements `AnswerSource` with an upstream server; only id, model and fingerprint of its answer are replaced."""

    def __init__(
        self,
        upstream: Upstream,
        adapter: ServedAdapter | None,
        body: Mapping[str, Any],
        header: Header,
        choices: Sequence[Choice],
        timeout_s: float,
    ) -> None:
        self._header = header
        self._choices = choices
        sent = {name: value for name, value in body.items() if name not in _OURS and value is not None}
        limit = "max_completion_tokens" if "max_completion_tokens" in sent else "max_tokens"
        sent[limit] = choices[0].request.max_tokens
        self._answer = upstream.ask(_PATHS[header.kind], sent, adapter)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    async def bodies(self) -> AsyncGenerator[Mapping[str, Any], None]:
        is_empty = True
        while (body := await self._next()) is not None:
            is_empty = False
            self._collect(body)
            yield {**body, **self._header.names}
        if is_empty:
            raise EngineError("the upstream server gave no answer", code="upstream", http_status=502)

    async def close(self) -> None:
        with suppress(Exception):
            await self._answer.aclose()

    async def _next(self) -> dict[str, Any] | None:
        try:
            if (left_s := self._deadline - time.monotonic()) <= 0:  # a slow reader holds capacity
                raise TimeoutError
            async with asyncio.timeout(left_s):
                return await anext(self._answer, None)
        except TimeoutError:
            message = f"the answer took longer than serve.timeout_s ({self._timeout_s:g} s)"
            raise ApiError(504, message, code="timeout") from None

    def _collect(self, body: Mapping[str, Any]) -> None:
        """Collect texts and finish reasons for capture; every field of the upstream server is checked."""
        told = body.get("choices")
        for one in told if isinstance(told, list) else []:
            index = one.get("index", 0) if isinstance(one, dict) else None
            if not isinstance(index, int) or not 0 <= index < len(self._choices):
                continue
            choice, said = self._choices[index], _said(one)
            if isinstance(text := said.get("content"), str):
                choice.texts.append(text)
                choice.has_text = True
            if said.get("tool_calls"):
                choice.finish = TOOL_CALLS
            elif isinstance(reason := one.get("finish_reason"), str):
                choice.finish = choice.finish or reason
                choice.was_cut |= was_cut(one, has_stops=bool(choice.request.stop))


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
        texts.append(str(_said((answer.get("choices") or [{}])[0]).get("content") or ""))
    return "".join(texts)


def _said(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message of a choice, whole or the next part of it; a text completion has only content."""
    said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    return said if isinstance(said, dict) else {}
