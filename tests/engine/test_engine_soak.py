"""Hundreds of requests over more adapters than fit, some cancelled: every answer as alone, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from support.engine import Loop, a_lively_base, an_adapter, asking, whole_answer
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.adapter_cache import AdapterCache
from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.generation import GenerationEnd, TextDelta

KINDS = ("plain", "rslora", "dora", "saved", "patterns")


async def idle_connections(
    adapter_cache: AdapterCache, adapters: list[Any], num: int
) -> dict[tuple[str, str | None], tuple[str, GenerationEnd]]:
    """Ask, cancel some, come back where there was no room; the answers by prompt and adapter."""
    luck, said = random.Random(11), {}

    async def one(number: int) -> None:
        adapter = luck.choice([None, *adapters])
        text = "".join(luck.choices("abcd ", k=luck.randint(1, 50)))
        await asyncio.sleep(luck.random() * num / 100)
        asked = asking(text, max_tokens=luck.randint(1, 30))
        while True:
            answer = adapter_cache.answer(asked, adapter)
            texts: list[str] = []
            try:
                async for part in answer:
                    if isinstance(part, TextDelta):
                        texts.append(part.text)
                        if number % 5 == 0 and luck.random() < 0.3:
                            return
                    else:
                        said[text, adapter.name if adapter else None] = ("".join(texts), part)
                        return
            except EngineError as error:
                if error.code != "adapter_capacity":
                    raise
                await asyncio.sleep(0.05 * luck.random())
            finally:
                await answer.aclose()

    await asyncio.gather(*map(one, range(num)))
    return said


@pytest.mark.soak
@pytest.mark.parametrize("num", [1000])
def test_hundreds_of_requests_over_more_adapters_than_fit_leave_nothing_behind(num: int, tmp_path: Path) -> None:
    base = a_lively_base(tmp_path / "base")
    adapters = [an_adapter(base, tmp_path / kind, kind, seed=number) for number, kind in enumerate(KINDS)]
    loop = Loop()
    engine = EmbeddedEngine(EngineSpec(base=str(base), device="cpu", max_batch=16, threads=1))
    try:
        said = loop.run(
            idle_connections(AdapterCache(engine, max_adapters=2, min_residency_s=0.0), adapters, num), 240.0
        )
        assert len(said) > num * 0.7
        state = loop.run(engine.state())
        assert state is not None
        assert (state["running"], state["waiting"], state["cache_bytes"]) == (0, 0, 0)
        assert len(state["adapters"]) <= 2
        assert engine.num_starts == 1
        for adapter in adapters:
            loop.run(engine.load(adapter))
        for (text, name), (answer, ended) in said.items():
            alone = loop.run(whole_answer(engine, asking(text, name, max_tokens=ended.num_written)))
            assert alone[0] == answer
            assert ended.adapter == name
    finally:
        loop.run(engine.stop())
        loop.close()
