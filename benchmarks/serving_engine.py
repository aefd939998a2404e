"""How fast the embedded engine answers: against plain transformers, one by one and in padded batches; same tokens.

Also how long answers pause while an adapter is loaded, against what peft's own loading holds a model up.
`measure(quick)` is called by benchmarks/serving.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.core.environment import set_defaults_here
from tunesmith.core.files import publish_folder
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
from tunesmith.serving.generation import GenerationRequest, TextDelta

_CONTEXT = 1024
_NUM_ADAPTERS = 4
_ROUNDS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One request: tokens to read, tokens to write."""

    prompt: tuple[int, ...]
    num: int


def measure(quick: bool, device: str = "auto") -> dict[str, Any]:
    """Tokens per second by arm and number of requests at once, pauses in milliseconds."""
    set_defaults_here()  # plain transformers computes in this process: the same for all arms
    with tempfile.TemporaryDirectory() as scratch:
        base = _a_base(Path(scratch) / "base", quick)
        adapters = [
            _an_adapter(base, Path(scratch) / f"adapter-{number}", number) for number in range(_NUM_ADAPTERS + 1)
        ]
        report: dict[str, Any] = {"quick": quick, "throughput": {}}
        plain = _Plain(base, device)
        report["device"] = str(plain.device)
        for at_once in (8, 32):
            work = _Work(_jobs((3 if quick else 4) * at_once, quick), at_once, device)
            report["throughput"][str(at_once)] = _throughput(plain, base, adapters, work)
        report["pause_ms"] = {**asyncio.run(_pause(base, adapters, device, quick)), **plain.peft_pause(adapters)}
    return report


@dataclass(frozen=True)
class _Work:
    """Jobs, of which so many are under way at once: as soon as one is answered the next is asked."""

    jobs: list[Job]
    at_once: int
    device: str


def _throughput(plain: _Plain, base: Path, adapters: Sequence[ServedAdapter], work: _Work) -> dict[str, Any]:
    num = sum(job.num for job in work.jobs)
    one_s, one = plain.one_by_one(work.jobs)
    static_s, static = plain.static(work.jobs, work.at_once)
    engine_s, said = asyncio.run(_engine(base, [], work))
    mixed_s, _ = asyncio.run(_engine(base, adapters[:_NUM_ADAPTERS], work))
    return {
        "requests": len(work.jobs),
        "tokens": num,
        "one_by_one_tokens_per_s": round(num / one_s, 1),
        "static_tokens_per_s": round(num / static_s, 1),
        "engine_tokens_per_s": round(num / engine_s, 1),
        f"engine_{_NUM_ADAPTERS}_adapters_tokens_per_s": round(num / mixed_s, 1),
        "engine_over_one_by_one": round(one_s / engine_s, 2),
        "engine_over_static": round(static_s / engine_s, 2),
        "same_tokens": sum(mine == theirs for mine, theirs in zip(said, one, strict=True)),
        "static_same_tokens": sum(mine == theirs for mine, theirs in zip(static, one, strict=True)),
    }


class _Plain:
    """transformers' own generate, in this process."""

    def __init__(self, base: Path, device: str) -> None:
        import torch

        from tunesmith.models.loading import load_base, pick_device

        self.device = pick_device() if device == "auto" else torch.device(device)
        self._model = load_base(base, self.device)

    def one_by_one(self, jobs: list[Job]) -> tuple[float, list[list[int]]]:
        self._generate([list(jobs[0].prompt)], 4)  # warm
        return _best(lambda: [self._generate([list(job.prompt)], job.num)[0] for job in jobs])

    def static(self, jobs: list[Job], at_once: int) -> tuple[float, list[list[int]]]:
        """So many at once, filled up on the left, written until the longest is done; then the next."""
        batches = [jobs[start : start + at_once] for start in range(0, len(jobs), at_once)]
        self._generate([list(job.prompt) for job in batches[0]], 2)  # warm
        seconds, said = _best(
            lambda: [
                self._generate([list(job.prompt) for job in some], max(job.num for job in some)) for some in batches
            ]
        )
        return seconds, [tokens[: job.num] for tokens, job in zip(itertools.chain(*said), jobs, strict=True)]

    def _generate(self, prompts: list[list[int]], num: int) -> list[list[int]]:
        import torch

        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                pad_token_id=0,
            )
        return list(made[:, width:].tolist())

    def peft_pause(self, adapters: Sequence[ServedAdapter]) -> dict[str, float]:
        """How long nothing can be answered while peft loads an adapter, and while it switches to one."""
        from peft import PeftModel

        model = PeftModel.from_pretrained(self._model, str(adapters[0].path), adapter_name="a0")
        loads, switches = [], []
        for number, adapter in enumerate(adapters[1:], start=1):
            start = time.perf_counter()
            model.load_adapter(str(adapter.path), adapter_name=f"a{number}")
            loads.append(time.perf_counter() - start)
            start = time.perf_counter()
            model.set_adapter(f"a{number}")
            switches.append(time.perf_counter() - start)
        model.unload()
        return {
            "peft_load_adapter": round(1e3 * statistics.median(loads), 2),
            "peft_set_adapter": round(1e3 * statistics.median(switches), 2),
        }


async def _engine(base: Path, adapters: Sequence[ServedAdapter], work: _Work) -> tuple[float, list[list[int]]]:
    """With adapters, the jobs ask for them in turn."""
    spec = {"base": str(base), "device": work.device, "max_batch": work.at_once}
    engine = EmbeddedEngine(EngineSpec.model_validate(spec))
    try:
        for adapter in adapters:
            await engine.load(adapter)
        names = [adapter.name for adapter in adapters] or [None]
        asked = [_asked(job, names[number % len(names)]) for number, job in enumerate(work.jobs)]
        checked = await asyncio.gather(*(_ids(engine, one) for one in asked))
        seconds = [await _answered(engine, asked, work.at_once) for _ in range(_ROUNDS)]
        return min(seconds), list(checked)
    finally:
        await engine.stop()


async def _answered(engine: EmbeddedEngine, asked: list[GenerationRequest], at_once: int) -> float:
    """How long it takes until all are answered, so many under way at once."""
    left = iter(asked)

    async def client() -> None:
        for one in left:
            await _times(engine, one)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return time.perf_counter() - start


async def _pause(base: Path, adapters: Sequence[ServedAdapter], device: str, quick: bool) -> dict[str, float]:
    """The longest silence of any of eight answers: without loading, while one kind is loaded first, and while again."""
    engine = EmbeddedEngine(EngineSpec.model_validate({"base": str(base), "device": device}))
    jobs = [Job(tuple(range(10, 40)), 120 if quick else 400) for _ in range(8)]
    found: dict[str, float] = {}
    try:
        await asyncio.gather(*(_times(engine, _asked(job, None)) for job in jobs))  # warm
        for name, loads in (("undisturbed", []), ("first_load", adapters[:1]), ("next_loads", adapters[1:])):
            under_way = [asyncio.create_task(_times(engine, _asked(job, None))) for job in jobs]
            await asyncio.sleep(0.1)
            for adapter in loads:
                await engine.load(adapter)
            times = await asyncio.gather(*under_way)
            gaps = [later - earlier for row in times for earlier, later in itertools.pairwise(row)]
            found[f"engine_longest_gap_{name}"] = round(1e3 * max(gaps), 2)
        found["engine_usual_gap"] = round(1e3 * statistics.median(gaps), 2)
    finally:
        await engine.stop()
    return found


def _best(work: Callable[[], T]) -> tuple[float, T]:
    """The shortest of some rounds: whatever else the machine does only makes it slower."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        made = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), made


def _asked(job: Job, adapter: str | None) -> GenerationRequest:
    return GenerationRequest(id="job", adapter=adapter, prompt=list(job.prompt), max_tokens=job.num, temperature=0.0)


async def _ids(engine: EmbeddedEngine, asked: GenerationRequest) -> list[int]:
    """The tokens of an answer."""
    pieces = [said async for said in engine.generate(replace(asked, top_logprobs=0)) if isinstance(said, TextDelta)]
    return [token.id for piece in pieces for token in piece.tokens]


async def _times(engine: EmbeddedEngine, asked: GenerationRequest) -> list[float]:
    """When its pieces came."""
    return [time.perf_counter() async for _ in engine.generate(asked)]


def _jobs(num: int, quick: bool) -> list[Job]:
    """Prompts and answers of very different lengths, as people ask."""
    luck = random.Random(num)
    most = 48 if quick else 256
    return [
        Job(tuple(luck.randrange(10, 250) for _ in range(luck.randint(8, 80 if quick else 200))), luck.randint(4, most))
        for _ in range(num)
    ]


def _a_base(folder: Path, quick: bool) -> Path:
    """A Llama with random weights that never ends an answer by itself, so that every arm writes the same amount."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tunesmith.demo.base_model import byte_tokenizer

    tokenizer = byte_tokenizer()
    hidden, layers = (128, 4) if quick else (512, 12)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=_CONTEXT,
            initializer_range=0.05,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        letters = tokenizer("abcdefghijklmnopqrstuvwxyz ").input_ids
        others = [token for token in range(len(tokenizer)) if token not in letters]
        model.lm_head.weight[others] = 0.0  # letters only: every token is a character that can be told at once
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _an_adapter(base: Path, folder: Path, seed: int) -> ServedAdapter:
    import torch

    from tunesmith.models.adapters import new_adapter, save_adapter
    from tunesmith.models.loading import load_base
    from tunesmith.profiles.profile import Method, Recipe

    torch.manual_seed(seed)
    adapted = new_adapter(load_base(base, torch.device("cpu")), Recipe(method=Method.SFT, lora_rank=16))
    for name, tensor in adapted.named_parameters():
        if "lora_B" in name:
            tensor.data.normal_(std=0.02)
    staged = folder.with_name(f"{folder.name}.staged")
    save_adapter(adapted, staged, base.name)
    return ServedAdapter(f"bench@v{seed}", folder, publish_folder(staged, folder).digest)
