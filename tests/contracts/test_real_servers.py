"""A real vLLM and a real llama.cpp load, serve, switch and lose our adapters, and answer as the trainer does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.real_servers import RealVllm, llama_server
from support.serving_bases import an_adapter, greedy, save_base
from support.serving_families import FAMILIES, a_model, write_family
from support.target_contract import comes_back, keeps_the_contract
from support.target_worlds import Made, World, a_llamacpp, kill_processes, shared_adapters
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.deployment.targets.registry import make_target
from tunesmith.serving.gateway.upstream import UpstreamServer

pytestmark = [pytest.mark.extra, pytest.mark.timeout(900), pytest.mark.xdist_group("real_servers")]
QUESTION = "the same question, long enough to fill several blocks of a cache of prompts, is asked again and again"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return shared_adapters(tmp_path_factory.getbasetemp() / "adapters-of-targets")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    folder = tmp_path_factory.mktemp("vllm")
    server = RealVllm(save_base(folder / "base"), folder / "vllm.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(params=["vllm", "llamacpp"])
def world(request: pytest.FixtureRequest, made: Made, tmp_path: Path) -> Iterator[World]:
    if request.param == "llamacpp":
        with a_llamacpp(tmp_path, made, [llama_server(), "-t", "1", "-c", "1024", "-np", "2"]) as world:
            yield world
        return
    server: RealVllm = request.getfixturevalue("vllm")
    options = {"url": server.url, "timeout_s": 120}
    world = World("vllm", options, tmp_path, made.first, made.second, made.wide, "lora_rank: 32", server.kill,
                  server.start, about={"is_slow": True})  # fmt: skip
    yield world
    world.target().flip(None)
    for name in world.target().loaded():
        world.target().unload(name)


def test_real_server_keeps_the_contract(world: World) -> None:
    keeps_the_contract(world)


def test_loaded_adapter_answers_as_the_trainer_does(world: World) -> None:
    """Template, tokens, answer and log-probabilities, on both versions and for two prompts."""
    target = world.target()
    for adapter in (world.first, world.second):
        target.load(adapter)
        prompts = [[{"role": "user", "content": text}] for text in (QUESTION, "hi")]
        readings = target.probe(adapter, prompts, NUM_TOKENS)
        assert readings is not None
        for reading, text in zip(readings, (QUESTION, "hi"), strict=True):
            prompt, answer, log_probs = greedy(adapter, text, NUM_TOKENS)
            assert reading.prompt_ids == tuple(prompt)
            assert reading.prompt_text == f"<|begin|><|user|>{text}<|end|><|assistant|>"
            assert reading.num_prompt == len(prompt)
            told = list(reading.answer_ids or ())
            assert told == answer[: len(told)]
            assert len(told) >= len(answer) - 1  # llama.cpp does not tell the token that ends an answer
            if reading.log_probs is not None:
                assert list(reading.log_probs) == pytest.approx(log_probs[: len(reading.log_probs)], abs=0.01)


def test_same_prompt_after_a_switch_is_not_answered_from_the_old_cache(world: World) -> None:
    """Each is asked twice in turns, by its exact name: always what a fresh load of it writes."""
    target: Any = world.target()
    expected = {}
    for adapter in (world.first, world.second):
        target.load(adapter)
        expected[adapter.name] = greedy(adapter, QUESTION, NUM_TOKENS)[1]
    bare = greedy(None, QUESTION, NUM_TOKENS)[1]
    assert len({*map(tuple, expected.values()), tuple(bare)}) == 3
    order = [world.first, world.second, None, world.first, world.second, world.second, None, world.first]
    said = asyncio.run(_ask_in_turns(UpstreamServer(target, 60.0), order))
    for adapter, told in zip(order, said, strict=True):
        _, answer, log_probs = greedy(adapter, QUESTION, NUM_TOKENS)
        assert len(told) >= 3
        # llama.cpp leaves out tokens that are no whole character; what it tells stands in the same order
        rest = iter(zip(answer, log_probs, strict=True))
        for token, log_prob in told:
            assert any(token in (None, ours) and abs(log_prob - likely) < 0.02 for ours, likely in rest)


async def _ask_in_turns(
    upstream: UpstreamServer, order: list[ServedAdapter | None]
) -> list[list[tuple[int | None, float]]]:
    """The tokens of each answer, as far as they are told, and their log-probabilities."""
    found = []
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    try:
        for adapter in order:
            answers = [said async for said in upstream.ask("/v1/chat/completions", body, adapter)]
            assert len(answers) == 1
            tokens = answers[0]["choices"][0]["logprobs"]["content"]
            found.append([(token.get("id"), token["logprob"]) for token in tokens])
    finally:
        await upstream.close()
    return found


def test_lost_adapter_is_loaded_again_while_somebody_asks_and_the_answer_is_streamed(world: World) -> None:
    target: Any = world.target()
    third = an_adapter(world.root, "support@v3", seed=3)  # never loaded

    async def ask() -> list[dict[str, Any]]:
        upstream = UpstreamServer(target, 60.0)
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 5,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return [said async for said in upstream.ask("/v1/chat/completions", body, third)]
        finally:
            await upstream.close()

    chunks = asyncio.run(ask())
    assert third.name in target.loaded()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [5]
    assert any(choice["finish_reason"] == "length" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_of_every_family_answers_in_llama_cpp_as_the_trainer_does(family: str, tmp_path: Path) -> None:
    """The names and the order of rows that conversion chose are the right ones."""
    write_family(family, tmp_path / "base.gguf")
    options = {"model": "base.gguf", "start": [llama_server(), "-t", "1", "-c", "512", "-np", "1", "-ctk", "f32"]}
    target = make_target("llamacpp", options, root=tmp_path, profile="support")
    adapter = an_adapter(tmp_path, "support@v1", seed=1, base=a_model(family))
    try:
        assert target.refusal(adapter) is None
        target.load(adapter)
        readings = target.probe(adapter, [[{"role": "user", "content": QUESTION}]], NUM_TOKENS)
    finally:
        kill_processes(tmp_path)
    assert readings is not None
    answer = greedy(adapter, QUESTION, NUM_TOKENS, base=a_model(family))[1]
    assert list(readings[0].answer_ids or ()) == answer
    assert len(set(answer)) > 2
    assert answer != greedy(None, QUESTION, NUM_TOKENS, base=a_model(family))[1]


def test_restarted_server_is_brought_back_by_loading(world: World) -> None:
    comes_back(world)
