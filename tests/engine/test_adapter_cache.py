"""The pager around an engine: loads once however many ask, lets go by decision, waits for users, survives restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.programs.readings import ProbeResult
from tunesmith.serving.gateway.adapter_cache import AdapterCache
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta


class Ledger:
    """An engine that keeps books instead of computing, and refuses what a real one refuses."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.log: list[str] = []
        self.loaded: set[str] = set()
        self.broken: set[str] = set()
        self.is_running = False

    async def start(self) -> None:
        if not self.is_running:
            self.is_running, self.loaded = True, set()
            self.num_starts += 1

    async def stop(self, grace_s: float = 0.0) -> None:
        self.is_running = False

    async def generate(self, asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        await self.start()
        if asked.adapter is not None and asked.adapter not in self.loaded:
            raise EngineError(f"{asked.adapter} is not loaded", code="unknown_adapter", http_status=404)
        for text in "abc":
            await asyncio.sleep(0)
            yield TextDelta(text)
        yield GenerationEnd("stop", 1, 3, asked.adapter, "d")

    async def load(self, adapter: ServedAdapter) -> int:
        await asyncio.sleep(0.01)
        if adapter.name in self.broken:
            raise EngineError("it is broken", code="adapter_refused", http_status=422)
        self.loaded.add(adapter.name)
        self.log.append(f"+{adapter.name}")
        return 10

    async def unload(self, name: str) -> None:
        self.loaded.discard(name)
        self.log.append(f"-{name}")

    async def probe(
        self, adapter: str | None, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult]:
        return []


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def num_users(adapter_cache: AdapterCache) -> int:
    """Of all adapters in memory."""
    return sum(one["users"] for one in adapter_cache.state())


def an_adapter(name: str) -> ServedAdapter:
    return ServedAdapter(name, Path("/nowhere"), f"digest of {name}")


async def use(adapter_cache: AdapterCache, name: str) -> None:
    async with adapter_cache.acquire(an_adapter(name)) as given:
        assert given == name


def test_adapter_is_loaded_once_however_many_ask_at_once() -> None:
    async def story() -> list[str]:
        engine = Ledger()
        adapter_cache = AdapterCache(engine)
        await asyncio.gather(
            *(use(adapter_cache, "a@v1") for _ in range(20)), *(use(adapter_cache, "b@v1") for _ in range(20))
        )
        return engine.log

    assert asyncio.run(story()) == ["+a@v1", "+b@v1"]


def test_least_recently_asked_goes_and_not_within_the_hysteresis() -> None:
    async def story() -> None:
        engine, clock = Ledger(), Clock()
        adapter_cache = AdapterCache(engine, max_adapters=2, min_residency_s=60.0, clock=clock)
        for name in ("a@v1", "b@v1"):
            await use(adapter_cache, name)
            clock.now_s += 5
        with pytest.raises(EngineError) as refused:
            await use(adapter_cache, "c@v1")
        assert (refused.value.code, refused.value.http_status) == ("adapter_capacity", 503)
        assert refused.value.retry_after_s == 50.0
        await use(adapter_cache, "a@v1")  # asked again: now b is the one that waits longest
        clock.now_s += 59
        await use(adapter_cache, "c@v1")
        assert engine.log == ["+a@v1", "+b@v1", "-b@v1", "+c@v1"]
        assert {one["name"] for one in adapter_cache.state()} == {"a@v1", "c@v1"}

    asyncio.run(story())


def test_what_is_in_use_or_pinned_stays() -> None:
    async def story() -> None:
        engine, clock = Ledger(), Clock()
        adapter_cache = AdapterCache(engine, max_adapters=2, min_residency_s=60.0, clock=clock)
        adapter_cache.pin(["live@v1"])
        await use(adapter_cache, "live@v1")
        async with adapter_cache.acquire(an_adapter("busy@v1")):
            clock.now_s += 1000
            with pytest.raises(EngineError, match="cannot be loaded"):
                await use(adapter_cache, "c@v1")
            with pytest.raises(EngineError, match="answering"):
                await adapter_cache.unload("busy@v1")
        clock.now_s += 1000
        await use(adapter_cache, "c@v1")
        assert engine.loaded == {"live@v1", "c@v1"}

    asyncio.run(story())


def test_adapter_is_not_unloaded_while_it_answers() -> None:
    async def story() -> list[str]:
        engine = Ledger()
        adapter_cache = AdapterCache(engine)
        answer = adapter_cache.answer(GenerationRequest(id="x", adapter=None), an_adapter("a@v1"))
        await anext(answer)
        assert num_users(adapter_cache) == 1
        with pytest.raises(EngineError, match="is answering requests"):
            await adapter_cache.unload("a@v1")
        await answer.aclose()
        assert num_users(adapter_cache) == 0
        await adapter_cache.unload("a@v1")
        return engine.log

    assert asyncio.run(story()) == ["+a@v1", "-a@v1"]


def test_new_process_of_the_engine_is_given_the_adapter_again() -> None:
    async def story() -> list[str]:
        engine = Ledger()
        adapter_cache = AdapterCache(engine)
        await use(adapter_cache, "a@v1")
        await engine.stop()
        assert isinstance(
            [one async for one in adapter_cache.answer(GenerationRequest("x", None), an_adapter("a@v1"))][-1],
            GenerationEnd,
        )
        engine.is_running = False  # it dies after the pager looked: the engine refuses, and is asked again
        engine.loaded.clear()
        assert [one["name"] for one in adapter_cache.state()] == ["a@v1"]
        assert isinstance(
            [one async for one in adapter_cache.answer(GenerationRequest("x", None), an_adapter("a@v1"))][-1],
            GenerationEnd,
        )
        return engine.log

    assert asyncio.run(story()) == ["+a@v1"] * 3


def test_adapter_that_cannot_be_loaded_is_told_to_all_who_wait_and_tried_again_later() -> None:
    async def story() -> None:
        engine = Ledger()
        adapter_cache = AdapterCache(engine)
        engine.broken.add("a@v1")
        said = await asyncio.gather(*(use(adapter_cache, "a@v1") for _ in range(3)), return_exceptions=True)
        assert [getattr(one, "code", None) for one in said] == ["adapter_refused"] * 3
        engine.broken.clear()
        await use(adapter_cache, "a@v1")
        assert num_users(adapter_cache) == 0

    asyncio.run(story())


def test_whoever_asked_first_may_go_away_while_it_loads() -> None:
    async def story() -> list[str]:
        engine = Ledger()
        adapter_cache = AdapterCache(engine)
        first = asyncio.create_task(use(adapter_cache, "a@v1"))
        await asyncio.sleep(0.001)
        second = asyncio.create_task(use(adapter_cache, "a@v1"))
        await asyncio.sleep(0.001)
        first.cancel()
        await second
        assert num_users(adapter_cache) == 0
        return engine.log

    assert asyncio.run(story()) == ["+a@v1"]


def test_name_with_another_content_is_refused() -> None:
    async def story() -> None:
        adapter_cache = AdapterCache(Ledger())
        await use(adapter_cache, "a@v1")
        with pytest.raises(EngineError, match="must not be reused"):
            await adapter_cache.load(ServedAdapter("a@v1", Path("/nowhere"), "another"))

    asyncio.run(story())
