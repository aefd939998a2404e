"""Answers of the embedded engine: the choices of one request, generated concurrently within one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from tunesmith.serving.gateway.adapter_cache import LOST
from tunesmith.serving.gateway.answers import (
    Choice,
    Header,
    first_chunk,
    last_chunk,
    piece_chunk,
    usage_of,
    whole_choice,
)
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.schemas import CompletionRequest
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

Generate = Callable[[GenerationRequest], AsyncGenerator[TextDelta | GenerationEnd, None]]
_Item = tuple[int, TextDelta | GenerationEnd | Exception]


def max_tokens_of(completion: CompletionRequest, otherwise: int, most: int) -> int:
    """Maximum tokens per answer: of the request, else of the profile; at most serve.max_tokens."""
    asked = completion.generation.max_tokens
    return min(otherwise if asked is None else asked, most)


def expand_choices(
    completion: CompletionRequest, response_id: str, adapter: str | None, max_tokens: int
) -> list[GenerationRequest]:
    """One generation request per prompt and choice; each choice has its own seed."""
    row, seed = replace(completion.generation, adapter=adapter, max_tokens=max_tokens), completion.generation.seed
    rows: list[GenerationRequest] = []
    for prompt in completion.prompts or (None,):
        for choice in range(completion.num_choices):
            choice_seed = None if seed is None else (seed + choice) % 2**63
            rows.append(replace(row, id=f"{response_id}/{len(rows)}", prompt=prompt, seed=choice_seed))
    return rows


class EmbeddedSource:
    """Implements `AnswerSource` with the embedded engine."""

    def __init__(
        self,
        generate: Generate,
        completion: CompletionRequest,
        header: Header,
        choices: Sequence[Choice],
        timeout_s: float,
    ) -> None:
        self._completion = completion
        self._header = header
        self._choices = choices
        requests = [choice.request for choice in choices]
        self._streams = ChoiceStreams(generate, requests, timeout_s, is_buffered=not completion.stream)

    async def bodies(self) -> AsyncGenerator[Mapping[str, Any], None]:
        if self._completion.stream:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        while (item := await self._streams.next()) is not None:
            number, part = item
            self._choices[number].add(part)
        yield self._header.whole([whole_choice(self._header, choice) for choice in self._choices], self._usage())

    async def _chunks(self) -> AsyncGenerator[Mapping[str, Any], None]:
        header, started = self._header, set[int]()
        while (item := await self._streams.next()) is not None:
            number, part = item
            choice = self._choices[number]
            if header.kind == "chat" and number not in started:
                yield first_chunk(header, number)
            started.add(number)
            if isinstance(part, TextDelta):
                if part.text or part.tokens:
                    yield piece_chunk(header, choice, part.text, part.tokens)
                choice.add(part)
            else:
                choice.add(part)
                yield last_chunk(header, choice)
        if self._completion.include_usage:
            yield header.chunk([], self._usage())

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._choices, self._completion.num_choices)

    async def close(self) -> None:
        await self._streams.close()


class ChoiceStreams:
    """Starts all choices at once. `next` returns the next delta of any choice; closing cancels the rest.

    `is_buffered`: nothing is sent before all is generated. So a choice is passed on when it is complete, and one whose
    engine is lost is retried once, however much of it was generated.
    """

    def __init__(
        self, generate: Generate, rows: Sequence[GenerationRequest], timeout_s: float, *, is_buffered: bool = False
    ) -> None:
        self._is_buffered = is_buffered
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._num_open = len(rows)
        self._has_begun = False
        self._tasks = [asyncio.create_task(self._write(generate, row, number)) for number, row in enumerate(rows)]

    async def _write(self, generate: Generate, row: GenerationRequest, number: int) -> None:
        try:
            if not self._is_buffered:
                await self._ask(generate, row, lambda part: self._items.put_nowait((number, part)))
                return
            for part in await self._ask_for_all(generate, row):
                self._items.put_nowait((number, part))
        except Exception as error:
            self._items.put_nowait((number, error))

    async def _ask(
        self, generate: Generate, row: GenerationRequest, take: Callable[[TextDelta | GenerationEnd], None]
    ) -> None:
        async with aclosing(generate(row)) as parts:
            async for part in parts:
                self._has_begun = True
                take(part)
                if isinstance(part, GenerationEnd):
                    return
        raise EngineError("the engine ended an answer without saying so")

    async def _ask_for_all(self, generate: Generate, row: GenerationRequest) -> list[TextDelta | GenerationEnd]:
        found: list[TextDelta | GenerationEnd] = []
        try:
            await self._ask(generate, row, found.append)
        except EngineError as error:
            if not found or error.code not in LOST:  # with nothing generated, the adapter cache has retried already
                raise
            found.clear()
            await self._ask(generate, row, found.append)
        return found

    async def next(self) -> tuple[int, TextDelta | GenerationEnd] | None:
        """The number of a choice and its next delta; None: all have ended. Raises the error of a failed choice."""
        if not self._num_open:
            return None
        if time.monotonic() > self._deadline:  # also if deltas are queued: a slow reader holds capacity
            raise self._too_late()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                number, part = await self._items.get()
        except TimeoutError:
            raise self._too_late() from None
        if isinstance(part, Exception):
            raise part
        if isinstance(part, GenerationEnd):
            if part.finish == "cancelled":
                raise EngineError("the engine cancelled the answer; retry", http_status=503, retry_after_s=1.0)
            self._num_open -= 1
        return number, part

    def _too_late(self) -> ApiError:
        limit = f"within serve.timeout_s ({self._timeout_s:g} s)"
        if not self._has_begun:
            return ApiError(503, f"the answer did not start {limit}; retry", code="timeout", retry_after_s=5.0)
        return ApiError(504, f"the answer was not complete {limit}; request fewer tokens", code="timeout")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
