"""The rows of one request as they are written: several at once, in one order, within one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from tunesmith.serving.gateway.adapter_cache import LOST
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.parameters import Asked
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

Generate = Callable[[GenerationRequest], AsyncGenerator[TextDelta | GenerationEnd, None]]
_Item = tuple[int, TextDelta | GenerationEnd | Exception]


def limit_of(asked: Asked, otherwise: int, most: int) -> int:
    """Most tokens of each answer: what was asked for, else the profile's own, never more than serve.max_tokens."""
    return min(otherwise if asked.max_tokens is None else asked.max_tokens, most)


def rows_of(asked: Asked, response_id: str, adapter: str | None, max_tokens: int) -> list[GenerationRequest]:
    """What the engine is told: each prompt as often as there are choices, each choice with a seed of its own."""
    row = GenerationRequest(
        id=response_id,
        adapter=adapter,
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        stop=asked.stop,
        top_logprobs=asked.top_logprobs,
    )
    rows: list[GenerationRequest] = []
    for prompt in asked.prompts or (None,):
        for choice in range(asked.num_choices):
            rows.append(
                replace(
                    row,
                    id=f"{response_id}/{len(rows)}",
                    messages=asked.messages if prompt is None else None,
                    prompt=prompt,
                    seed=None if asked.seed is None else (asked.seed + choice) % 2**63,
                )
            )
    return rows


class Writing:
    """Asks for all rows at once. `next` gives what comes, from whichever row; closing cancels what is left.

    `is_whole`: nothing is sent before all is written. So a row is given when it is complete, and one whose engine is
    lost is asked again, once, however much of it was written.
    """

    def __init__(
        self, generate: Generate, rows: Sequence[GenerationRequest], timeout_s: float, *, is_whole: bool = False
    ) -> None:
        self._is_whole = is_whole
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._num_open = len(rows)
        self._has_begun = False
        self._tasks = [asyncio.create_task(self._write(generate, row, number)) for number, row in enumerate(rows)]

    async def _write(self, generate: Generate, row: GenerationRequest, number: int) -> None:
        try:
            if not self._is_whole:
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
            if not found or error.code not in LOST:  # with nothing written, the pager has asked again already
                raise
            found.clear()
            await self._ask(generate, row, found.append)
        return found

    async def next(self) -> tuple[int, TextDelta | GenerationEnd] | None:
        """What is written next, and of which row; None: all rows have ended. Raises what went wrong."""
        if not self._num_open:
            return None
        if time.monotonic() > self._deadline:  # also where more is written already: a slow reader holds a place
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
                raise EngineError("the engine gave the answer up; ask again", http_status=503, retry_after_s=1.0)
            self._num_open -= 1
        return number, part

    def _too_late(self) -> ApiError:
        said = f"within serve.timeout_s ({self._timeout_s:g} s)"
        if not self._has_begun:
            return ApiError(503, f"the answer was not begun {said}; ask again", code="timeout", retry_after_s=5.0)
        return ApiError(504, f"the answer was not complete {said}; ask for fewer tokens", code="timeout")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
