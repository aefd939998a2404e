"""The engine's process as the gateway holds it: many at once, each as if alone; refusals, cancellation, death."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine import Loop, a_lively_base, an_adapter, asking, whole_answer
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.evaluation.evaluators.probe import probe_prompts
from tunesmith.models.adapters import load_adapter
from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.adapter_cache import AdapterCache
from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.heartbeat import Heartbeat
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

KINDS = ("plain", "dora", "saved")


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_lively_base(tmp_path_factory.mktemp("engine") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[ServedAdapter]:
    return [an_adapter(base, base.parent / kind, kind, seed=number) for number, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def engine(loop: Loop, base: Path, adapters: list[ServedAdapter]) -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(EngineSpec(base=str(base), device="cpu", max_batch=8, threads=1))
    for adapter in adapters:
        loop.run(made.load(adapter))
    yield made
    loop.run(made.stop())


def test_forty_requests_over_three_adapters_joining_at_random_equal_their_lone_answers(
    loop: Loop, engine: EmbeddedEngine
) -> None:
    luck = random.Random(3)
    names = [None, *(f"{kind}@v{number}" for number, kind in enumerate(KINDS))]
    asked = [
        asking(
            "".join(luck.choices("abc def", k=luck.randint(1, 60))),
            luck.choice(names),
            max_tokens=luck.randint(1, 40),
            temperature=luck.choice([0.0, 1.0]),
            seed=number,
        )
        for number in range(40)
    ]

    async def joining() -> list[tuple[str, GenerationEnd]]:
        async def late(one: GenerationRequest) -> tuple[str, GenerationEnd]:
            await asyncio.sleep(luck.random() * 0.3)
            return await whole_answer(engine, one)

        return await asyncio.gather(*map(late, asked))

    together = loop.run(joining())
    for one, said in zip(asked, together, strict=True):
        assert said == loop.run(whole_answer(engine, one))
    assert len({text for text, _ in together}) > 30, "answers that are all the same prove nothing"


def test_end_tells_which_content_wrote_the_answer(
    loop: Loop, engine: EmbeddedEngine, adapters: list[ServedAdapter]
) -> None:
    _, ended = loop.run(whole_answer(engine, asking("hello", adapters[1].name, max_tokens=5)))
    assert (ended.adapter, ended.digest) == (adapters[1].name, adapters[1].digest)
    assert ended.num_prompt == 9
    assert 1 <= ended.num_written <= 5


def test_reading_is_what_the_trainers_stack_reads(
    loop: Loop, engine: EmbeddedEngine, base: Path, adapters: list[ServedAdapter]
) -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("one", "a longer question?")]
    for adapter in adapters:
        model = load_adapter(load_base(base, torch.device("cpu")), adapter.path)
        ours = loop.run(engine.probe(adapter.name, prompts, 12))
        theirs = probe_prompts(model, ChatFormat(load_tokenizer(base)), prompts, 12)
        for mine, reference in zip(ours, theirs, strict=True):
            same = {"prompt_text", "prompt_ids", "num_prompt", "answer_ids", "answer_text", "finish"}
            assert mine.model_dump(include=same) == reference.model_dump(include=same)
            assert mine.log_probs == pytest.approx(reference.log_probs, abs=1e-4)


def test_stop_text_ends_the_answer(loop: Loop, engine: EmbeddedEngine) -> None:
    text, uncut = loop.run(whole_answer(engine, asking("a story", max_tokens=40)))
    stop = text[5:7]
    cut, ended = loop.run(whole_answer(engine, asking("a story", max_tokens=40, stop=(stop,))))
    assert cut == text[: text.index(stop)]
    assert (ended.finish, ended.stopped_by) == ("stop", "text")
    assert uncut.stopped_by == "model"
    assert ended.num_written < 40


def test_log_probs_come_with_the_tokens(loop: Loop, engine: EmbeddedEngine) -> None:
    async def pieces() -> list[Any]:
        return [said async for said in engine.generate(asking("hi", max_tokens=6, top_logprobs=3))]

    *said, ended = loop.run(pieces())
    tokens = [token for piece in said for token in piece.tokens]
    assert len(tokens) in (ended.num_written, ended.num_written - 1)  # the token that ends it is not told
    for token in tokens:
        assert len(token.top) == 3
        assert token.top[0] == (token.id, token.text, token.log_prob)
        assert token.log_prob < 0


@pytest.mark.parametrize(
    ("asked", "code", "status"),
    [
        (asking("x <|assistant|> y"), "invalid_prompt", 400),
        (asking("y" * 300), "context_length_exceeded", 400),
        (asking("", prompt=""), "empty_prompt", 400),
        (asking("", prompt=[]), "empty_prompt", 400),
        (asking("", prompt=[1, 9999]), "invalid_prompt", 400),
        (asking("x", max_tokens=0), "invalid_value", 400),
        (asking("x", temperature=float("nan")), "invalid_value", 400),
        (asking("half \ud800 a pair"), "invalid_prompt", 400),
        (asking("x", "nobody@v1"), "unknown_adapter", 404),
        (GenerationRequest(id="x", adapter=None, messages=[{"role": "user"}]), "invalid_prompt", 400),
        (GenerationRequest(id="x", adapter=None, messages=[]), "invalid_prompt", 400),
    ],
)
def test_request_that_cannot_be_answered_is_refused_alone(
    loop: Loop, engine: EmbeddedEngine, asked: GenerationRequest, code: str, status: int
) -> None:
    async def both() -> list[Any]:
        good = whole_answer(engine, asking("fine"))
        return await asyncio.gather(whole_answer(engine, asked), good, return_exceptions=True)

    refused, good = loop.run(both())
    assert isinstance(refused, EngineError), refused
    assert (refused.code, refused.http_status) == (code, status)
    assert good[1].num_written > 0


@pytest.mark.parametrize("told", ["messages", "prompt", "tokens"])
def test_prompts_of_megabytes_hold_nobody_up(loop: Loop, engine: EmbeddedEngine, told: str) -> None:
    """Turning one of them into tokens takes seconds: its beginning tells that it does not fit."""
    text = "far too long " * 300_000
    prompts = {"prompt": text, "tokens": [1] * 1_000_000}
    endless = asking(text) if told == "messages" else asking("", prompt=prompts[told])

    async def all_of_them() -> tuple[list[Any], float]:
        begun = time.monotonic()
        refused = [asyncio.create_task(whole_answer(engine, endless)) for _ in range(6)]
        await asyncio.sleep(0)
        await whole_answer(engine, asking("fine"))
        took = time.monotonic() - begun
        return await asyncio.gather(*refused, return_exceptions=True), took

    refused, took = loop.run(all_of_them())
    assert {error.code for error in refused} == {"context_length_exceeded"}
    assert took < 2.0


def test_prompt_of_few_tokens_and_many_characters_is_taken(loop: Loop, engine: EmbeddedEngine) -> None:
    """The beginning alone decides only where it holds more tokens than fit."""
    text = "<|user|>" * 240
    _, ended = loop.run(whole_answer(engine, asking("", prompt=text, max_tokens=2)))
    assert ended.num_prompt in (240, 241)


def test_any_number_is_a_seed(loop: Loop, engine: EmbeddedEngine) -> None:
    said = [
        loop.run(whole_answer(engine, asking("x", temperature=1.0, seed=seed)))
        for seed in (-1, (1 << 64) - 1, 1 << 100, 0)
    ]
    assert said[0] == said[1]
    assert said[2] == said[3] != said[0]


def test_prompt_of_text_or_tokens_is_taken_as_it_is(loop: Loop, engine: EmbeddedEngine, base: Path) -> None:
    ids = list(ChatFormat(load_tokenizer(base)).raw_prompt("<|user|>raw"))
    by_text = loop.run(whole_answer(engine, asking("", prompt="<|user|>raw")))
    assert by_text == loop.run(whole_answer(engine, asking("", prompt=ids)))
    assert by_text[1].num_prompt == len(ids)


def test_answer_fills_the_context_and_no_more(loop: Loop, engine: EmbeddedEngine) -> None:
    asked = asking("z" * 200, max_tokens=None, temperature=1.0, seed=1)
    _, ended = loop.run(whole_answer(engine, asked))
    assert ended.num_prompt + ended.num_written <= 256
    assert (ended.finish == "length") == (ended.num_prompt + ended.num_written == 256)


def test_closing_the_iterator_frees_the_row_at_once(loop: Loop, engine: EmbeddedEngine) -> None:
    async def some() -> dict[str, Any]:
        said = engine.generate(asking("long", max_tokens=200, temperature=1.5, seed=2))
        async for _ in said:
            break
        await said.aclose()
        state = await engine.state()
        assert state is not None
        return state

    state = loop.run(some())
    assert (state["running"], state["waiting"]) == (0, 0)
    assert state["cache_bytes"] == 0


def test_adapter_that_is_not_what_it_should_be_is_refused(
    loop: Loop, engine: EmbeddedEngine, base: Path, adapters: list[ServedAdapter], tmp_path: Path
) -> None:
    other = an_adapter(a_lively_base(tmp_path / "other", seed=4), tmp_path / "foreign", "plain")
    (tmp_path / "foreign" / "adapter_model.safetensors").chmod(0o644)
    changed = tmp_path / "changed"
    shutil.copytree(adapters[0].path, changed)
    weights = changed / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(EngineError, match="not what the manifest says"):
        loop.run(engine.load(ServedAdapter("changed@v1", changed, adapters[0].digest)))
    with pytest.raises(EngineError, match="expected"):
        loop.run(engine.load(ServedAdapter("mistaken@v1", adapters[0].path, other.digest)))
    with pytest.raises(EngineError, match="must not be reused"):
        loop.run(engine.load(ServedAdapter(adapters[0].name, other.path, other.digest)))
    pickled = tmp_path / "pickled"
    shutil.copytree(adapters[0].path, pickled)
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(EngineError, match="pickled weights can run code"):
        loop.run(engine.load(ServedAdapter("pickled@v1", pickled, adapters[0].digest)))
    assert loop.run(engine.load(adapters[0])) == loop.run(engine.load(adapters[0]))  # twice is once


def test_adapter_in_use_is_not_unloaded_and_an_unknown_one_is_no_error(
    loop: Loop, engine: EmbeddedEngine, base: Path, tmp_path: Path
) -> None:
    adapter = an_adapter(base, tmp_path / "used", "rslora", seed=9)

    async def story() -> None:
        await engine.load(adapter)
        said = engine.generate(asking("long", adapter.name, max_tokens=200, temperature=1.5, seed=2))
        await anext(said)
        with pytest.raises(EngineError, match="answering 1 requests"):
            await engine.unload(adapter.name)
        await said.aclose()
        await engine.unload(adapter.name)
        await engine.unload(adapter.name)
        with pytest.raises(EngineError, match="not loaded"):
            await whole_answer(engine, asking("x", adapter.name))

    loop.run(story())


def test_killed_engine_fails_what_was_heard_of_and_answers_the_rest_anew(
    loop: Loop, engine: EmbeddedEngine, adapters: list[ServedAdapter]
) -> None:
    adapter_cache, asked = AdapterCache(engine), asking("x", max_tokens=4)

    async def loaded() -> None:  # an earlier test may have ended the engine
        async for _ in adapter_cache.answer(asked, adapters[0]):
            pass

    loop.run(loaded())
    before = loop.run(whole_answer(engine, asking("x", adapters[0].name, max_tokens=4)))

    async def story() -> tuple[EngineError, tuple[str, Any]]:
        assert engine.pid is not None
        starts = engine.num_starts
        heard = adapter_cache.answer(asking("long", max_tokens=200, temperature=1.5, seed=2), adapters[0])
        await anext(heard)
        os.kill(engine.pid, signal.SIGSTOP)  # it takes the next request, and dies before it says anything
        unheard = adapter_cache.answer(asked, adapters[0])
        first = asyncio.ensure_future(anext(unheard))
        await asyncio.sleep(0.1)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as died:
            async for _ in heard:
                pass
        *pieces, ended = [await first, *[one async for one in unheard]]
        assert engine.num_starts == starts + 1
        assert [one["name"] for one in adapter_cache.state()] == [adapters[0].name]
        return died.value, ("".join(one.text for one in pieces if isinstance(one, TextDelta)), ended)

    died, after = loop.run(story())
    assert (died.code, died.http_status) == ("engine_died", 503)
    assert died.retry_after_s is not None
    assert "signal 9" in died.message
    assert after == before


def test_engine_that_hangs_is_ended_and_replaced(
    loop: Loop, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> tuple[int, EngineError]:
        await engine.start()
        assert engine.pid is not None
        old = engine.pid
        monkeypatch.setattr(engine._child, "heartbeat", Heartbeat(old, 1.0, lambda number: None))
        os.kill(old, signal.SIGSTOP)
        with pytest.raises(EngineError) as ended:
            await whole_answer(engine, asking("x"))
        assert engine.problem is not None
        assert engine.problem.endswith("it is being replaced")
        await engine.start()
        return old, ended.value

    old, ended = loop.run(story())
    assert (ended.code, ended.http_status) == ("engine_hung", 503)
    assert ended.retry_after_s is not None
    assert engine.pid not in (None, old)
    assert (engine.num_hung, engine.problem) == (1, None)
    assert not _runs(old)


def test_engine_that_takes_too_much_memory_is_ended(loop: Loop, base: Path) -> None:
    small = EmbeddedEngine(EngineSpec(base=str(base), device="cpu", threads=1), max_memory_gb=0.05)
    with pytest.raises(EngineError, match=r"serve\.max_memory_gb") as refused:
        loop.run(small.start())
    assert (refused.value.code, refused.value.http_status) == ("engine_memory", 503)
    assert small.pid is None


def test_engine_that_cannot_start_says_why_and_is_not_tried_at_once_again(loop: Loop, tmp_path: Path) -> None:
    broken = EmbeddedEngine(EngineSpec(base=str(tmp_path), device="cpu", digest="0" * 64, threads=1))
    with pytest.raises(EngineError, match=r"no config\.json"):
        loop.run(broken.start())
    assert broken.num_starts == 1
    with pytest.raises(EngineError) as refused:
        loop.run(broken.start())
    assert broken.num_starts == 1
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 0.5


def test_engine_goes_when_the_gateway_is_killed(base: Path) -> None:
    code = (
        "import asyncio, os\n"
        "from pathlib import Path\n"
        "from tunesmith.serving.engine_spec import EngineSpec\n"
        "from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine\n"
        "async def main():\n"
        f"    engine = EmbeddedEngine(EngineSpec(base={str(base)!r}, device='cpu', threads=1))\n"
        "    starting = asyncio.create_task(engine.start())\n"
        "    while not (pids := Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text().split()):\n"
        "        await asyncio.sleep(0.02)\n"
        "    print(pids[0], flush=True)\n"
        "    await starting\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        gateway.kill()  # while the engine is still loading
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
