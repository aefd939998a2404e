"""The contract of a source of answers, over both: what the client is sent, and what the choices hold for capture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import pytest

from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.serving.gateway.answers import Choice, Header
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.embedded_source import EmbeddedSource, expand_choices
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.interfaces import AnswerSource
from tunesmith.serving.gateway.proxy import ProxiedSource
from tunesmith.serving.gateway.schemas import ChatBody
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

NAMES = {"id": "chatcmpl-1", "model": "support@v1", "system_fingerprint": "fp_0"}
Make = Callable[..., tuple[AnswerSource, list[Choice], list[str]]]


def asked(**wishes: Any) -> tuple[Any, Header, list[Choice]]:
    said = {"model": "support", "messages": [{"role": "user", "content": "hi"}], **wishes}
    completion = ChatBody.model_validate(said).request()
    header = Header("chatcmpl-1", "chat", 1, "support@v1", "fp_0", False, completion.include_usage)
    rows = expand_choices(completion, header.id, "support@v1", 8)
    return completion, header, [Choice(index, row) for index, row in enumerate(rows)]


def embedded(*texts: str, cut: bool = False, hangs: bool = False, timeout_s: float = 5.0, **wishes: Any) -> Any:
    """A source over an engine that writes these texts."""
    completion, header, choices = asked(**wishes)
    closed: list[str] = []

    async def generate(request: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        try:
            for text in texts:
                yield TextDelta(text)
            if hangs:
                await asyncio.sleep(3600)
            yield GenerationEnd("stop", 1, len(texts), None, None, "text" if cut else "model")
        finally:
            closed.append(request.id)

    return EmbeddedSource(generate, completion, header, choices, timeout_s), choices, closed


class Server:
    """An upstream server that answers with these bodies."""

    def __init__(self, *bodies: Any, hangs: bool = False) -> None:
        self.bodies, self.hangs = bodies, hangs
        self.sent: list[Mapping[str, Any]] = []
        self.closed: list[str] = []

    async def ask(
        self, path: str, body: Mapping[str, Any], adapter: ServedAdapter | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        self.sent.append(body)
        try:
            for said in self.bodies:
                yield said
            if self.hangs:
                await asyncio.sleep(3600)
        finally:
            self.closed.append(path)

    async def close(self) -> None:
        """It has no connections."""


def proxied(*texts: str, cut: bool = False, hangs: bool = False, timeout_s: float = 5.0, **wishes: Any) -> Any:
    """A source over an upstream server that writes these texts."""
    _, header, choices = asked(**wishes)
    theirs = {"id": "theirs", "model": "theirs"}
    ending = {"index": 0, "finish_reason": "stop", "stop_reason": "!" if cut else None}
    if wishes.get("stream"):
        bodies = [{**theirs, "choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
        bodies += [] if hangs else [{**theirs, "choices": [{"delta": {}, **ending}]}]
    else:
        bodies = [] if hangs else [{**theirs, "choices": [{"message": {"content": "".join(texts)}, **ending}]}]
    server = Server(*bodies, hangs=hangs)
    return ProxiedSource(server, None, wishes, header, choices, timeout_s), choices, server.closed


async def all_of(source: AnswerSource) -> list[Mapping[str, Any]]:
    try:
        return [body async for body in source.bodies()]
    finally:
        await source.close()


both = pytest.mark.parametrize("make", [embedded, proxied])


@both
def test_a_whole_answer_is_one_body_under_our_names(make: Make) -> None:
    async def ask() -> None:
        source, (choice,), closed = make("a", "b")
        (body,) = await all_of(source)
        assert NAMES.items() <= body.items()
        assert body["choices"][0]["message"]["content"] == "ab"
        assert (choice.text, choice.finish, choice.ended_by_itself, choice.has_text) == ("ab", "stop", True, True)
        assert len(closed) == 1

    asyncio.run(ask())


@both
def test_a_stream_is_chunks_under_our_names_and_the_choice_holds_all_of_it(make: Make) -> None:
    async def ask() -> None:
        source, (choice,), _ = make("a", "b", stream=True)
        bodies = await all_of(source)
        assert all(NAMES.items() <= body.items() for body in bodies)
        texts = [body["choices"][0]["delta"].get("content") or "" for body in bodies]
        assert ("".join(texts), bodies[-1]["choices"][0]["finish_reason"]) == ("ab", "stop")
        assert (choice.text, choice.ended_by_itself) == ("ab", True)

    asyncio.run(ask())


@both
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_sequence_of_the_caller_ended_is_not_ended_by_itself(make: Make, stream: bool) -> None:
    async def ask() -> None:
        source, (choice,), _ = make("a", cut=True, stream=stream, stop="!")
        await all_of(source)
        assert (choice.finish, choice.ended_by_itself) == ("stop", False)

    asyncio.run(ask())


@both
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_beyond_its_time_is_a_timeout_and_is_cancelled(make: Make, stream: bool) -> None:
    async def ask() -> None:
        source, (choice,), closed = make("a", hangs=True, timeout_s=0.05, stream=stream)
        with pytest.raises(ApiError, match="timeout_s") as caught:
            await all_of(source)
        assert (caught.value.code, choice.finish, len(closed)) == ("timeout", None, 1)
        assert choice.text == ("a" if stream else "")

    asyncio.run(ask())


def test_an_upstream_server_without_an_answer_is_an_error() -> None:
    async def ask() -> None:
        _, header, choices = asked()
        with pytest.raises(EngineError, match="gave no answer"):
            await all_of(ProxiedSource(Server(), None, {}, header, choices, 5.0))

    asyncio.run(ask())


def test_fields_of_the_gateway_are_not_forwarded_and_the_limit_keeps_its_name() -> None:
    async def ask(**body: Any) -> Mapping[str, Any]:
        server = Server({"choices": []})
        _, header, choices = asked()
        await all_of(ProxiedSource(server, None, body, header, choices, 5.0))
        return server.sent[0]

    said = {"user": "u", "metadata": {"a": "b"}, "store": True, "seed": None, "top_k": 5}
    assert asyncio.run(ask(**said)) == {"top_k": 5, "max_tokens": 8}
    assert asyncio.run(ask(max_completion_tokens=99)) == {"max_completion_tokens": 8}


@pytest.mark.parametrize(
    "told",
    [None, "text", [None], [{"index": "0"}], [{"index": 7, "message": {"content": "x"}}], [{"message": "x"}]],
    ids=str,
)
def test_a_malformed_answer_of_an_upstream_server_passes_and_adds_nothing(told: Any) -> None:
    async def ask() -> None:
        _, header, choices = asked()
        (body,) = await all_of(ProxiedSource(Server({"choices": told}), None, {}, header, choices, 5.0))
        assert body == {"choices": told, **NAMES}
        assert (choices[0].has_text, choices[0].finish) == (False, None)

    asyncio.run(ask())
