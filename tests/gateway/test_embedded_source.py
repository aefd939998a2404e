"""The rows of a request: one deadline for all, the reason why it was missed, and nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tunesmith.serving.gateway.admission import AdmissionControl
from tunesmith.serving.gateway.api_errors import ApiError, headers_of, status_of
from tunesmith.serving.gateway.embedded_source import ChoiceStreams, expand_choices, max_tokens_of
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.schemas import ChatBody, CompletionRequest, TextBody
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

CHAT = {"model": "support", "messages": [{"role": "user", "content": "hi"}]}


def chat(**wishes: Any) -> CompletionRequest:
    return ChatBody.model_validate({**CHAT, **wishes}).request()


def writes(*pieces: str, then_hangs: bool = False, left: list[str] | None = None):  # type: ignore[no-untyped-def]
    """An engine that writes these pieces, and then ends or never says a word again."""

    async def generate(asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        try:
            for piece in pieces:
                yield TextDelta(piece)
            if then_hangs:
                await asyncio.sleep(3600)
            yield GenerationEnd("stop", 1, len(pieces), None, None)
        finally:
            if left is not None:
                left.append(asked.id)

    return generate


def rows(num: int = 1) -> list[GenerationRequest]:
    return expand_choices(chat(n=num), "chatcmpl-1", "support@v1", 64)


async def all_of(writing: ChoiceStreams) -> list[str]:
    texts = []
    try:
        while (item := await writing.next()) is not None:
            texts.append(item[1].text if isinstance(item[1], TextDelta) else "")
    finally:
        await writing.close()
    return texts


def test_an_answer_that_is_not_begun_in_time_may_be_asked_again() -> None:
    left: list[str] = []

    async def ask() -> None:
        await all_of(ChoiceStreams(writes(then_hangs=True, left=left), rows(2), 0.05))

    with pytest.raises(ApiError) as caught:
        asyncio.run(ask())
    assert status_of(caught.value) == 503
    assert b"retry-after" in dict(headers_of(caught.value))
    assert sorted(left) == ["chatcmpl-1/0", "chatcmpl-1/1"], "what was asked is cancelled"


def test_an_answer_that_is_not_complete_in_time_is_given_up() -> None:
    async def ask() -> None:
        await all_of(ChoiceStreams(writes("some", then_hangs=True), rows(), 0.05))

    with pytest.raises(ApiError) as caught:
        asyncio.run(ask())
    assert status_of(caught.value) == 504
    assert caught.value.code == "timeout"


def test_one_row_that_fails_fails_all_of_them() -> None:
    left: list[str] = []
    hangs = writes("some", then_hangs=True, left=left)

    async def generate(asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        if asked.id.endswith("/1"):
            raise ApiError(503, "broken", code="engine_died")
        async for part in hangs(asked):
            yield part

    async def ask() -> None:
        await all_of(ChoiceStreams(generate, rows(2), 5.0))

    with pytest.raises(ApiError, match="broken"):
        asyncio.run(ask())
    assert left == ["chatcmpl-1/0"]


def test_rows_have_seeds_of_their_own_and_the_limit_of_the_server() -> None:
    asked = chat(n=2, seed=7, max_tokens=1e9)
    made = expand_choices(asked, "chatcmpl-1", None, max_tokens_of(asked, 256, 64))
    assert [row.seed for row in made] == [7, 8]
    assert {row.max_tokens for row in made} == {64}
    completion = TextBody.model_validate({"model": "support", "prompt": ["a", "b"], "n": 2}).request()
    texts = expand_choices(completion, "cmpl-1", None, max_tokens_of(completion, 256, 64))
    assert [row.prompt for row in texts] == ["a", "a", "b", "b"]
    assert {row.max_tokens for row in texts} == {16}


def test_a_full_room_tells_how_long_to_wait_and_is_free_again() -> None:
    admission = AdmissionControl(2)
    admission.acquire(2)
    with pytest.raises(ApiError) as caught:
        admission.acquire(1)
    assert status_of(caught.value) == 429
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1.0
    admission.release(2)
    admission.acquire(1)
    assert admission.num_rows == 1


def dies_after(*pieces: str, times: int):  # type: ignore[no-untyped-def]
    """An engine that is lost in the middle of its first answers, and then writes a whole one."""
    num_asked = 0

    async def generate(asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        nonlocal num_asked
        num_asked += 1
        for piece in pieces:
            yield TextDelta(piece)
            if num_asked <= times:
                raise EngineError("lost", code="engine_hung", http_status=503, retry_after_s=1.0)
        yield GenerationEnd("stop", 1, len(pieces), None, None)

    return generate


def test_an_answer_of_which_nothing_was_sent_is_asked_again_when_the_engine_is_lost() -> None:
    async def ask(times: int, *, is_buffered: bool) -> list[str]:
        return await all_of(ChoiceStreams(dies_after("a", "b", times=times), rows(), 5.0, is_buffered=is_buffered))

    assert asyncio.run(ask(1, is_buffered=True)) == ["a", "b", ""]
    for times, is_buffered in ((2, True), (1, False)):
        with pytest.raises(EngineError, match="lost"):
            asyncio.run(ask(times, is_buffered=is_buffered))


def test_a_whole_answer_that_is_late_says_whether_it_was_begun() -> None:
    async def ask() -> None:
        await all_of(ChoiceStreams(writes("a", then_hangs=True), rows(), 0.05, is_buffered=True))

    with pytest.raises(ApiError) as caught:
        asyncio.run(ask())
    assert status_of(caught.value) == 504


@pytest.mark.parametrize(
    ("asked", "most", "expected"), [(None, 1024, 256), (None, 64, 64), (900, 1024, 900), (9, 64, 9)]
)
def test_a_request_without_a_limit_gets_that_of_the_profile(asked: int | None, most: int, expected: int) -> None:
    assert max_tokens_of(chat(max_tokens=asked), 256, most) == expected


def test_whoever_reads_too_slowly_does_not_hold_a_place_beyond_the_deadline() -> None:
    texts: list[str] = []

    async def ask() -> None:
        writing = ChoiceStreams(writes(*"abcdef"), rows(), 0.2)
        try:
            while (item := await writing.next()) is not None:
                texts.append(item[1].text if isinstance(item[1], TextDelta) else "")
                await asyncio.sleep(0.08)
        finally:
            await writing.close()

    with pytest.raises(ApiError) as caught:
        asyncio.run(ask())
    assert status_of(caught.value) == 504
    assert 1 <= len(texts) <= 4
