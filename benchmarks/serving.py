"""`tunesmith serve` beside its peers: what capturing and switching cost, how fast the engine writes.

    python benchmarks/serving.py [--quick]

1. Capture: requests to one server, with and without consent to be kept, in blocks whose order changes; the same
   requests to the engine itself, without HTTP. Medians of pairs of blocks, with an interval over resampled pairs.
2. Switch: clients that ask all the time while the live adapter is flipped in the store again and again. Counted: failed
   requests, answers that are not wholly of the version they name, latencies, the longest time in which no answer ended.
   Peer: peft's own `load_adapter` on the same model, during which nothing at all is answered.
3. Throughput of the engine beside plain transformers `generate` (see serving_engine.py).

Random weights: what is written makes no sense, and each version writes something else, so that a mixture would show.
"""

# ruff: noqa: E402 - this folder has a module `queue`, which must not be taken for the standard library's

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [*(entry for entry in sys.path if os.path.abspath(entry) != HERE), HERE]

import argparse
import asyncio
import importlib.metadata
import json
import platform
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tunesmith.client import Client
from tunesmith.core.files import publish_folder
from tunesmith.deployment import queries as deployments
from tunesmith.models import queries as adapters
from tunesmith.profiles.base_model import base_digest

PROFILE = "bench"
NUM_VERSIONS = 4
PROMPT = "Write down what the day was like, in your own words, and do not stop early. "
PER_BLOCK = 8
WORDS = ("rain", "harbour", "bread", "seven", "letter", "north", "slowly", "glass", "engine", "Tuesday")


def build_base(folder: Path, hidden: int, layers: int) -> None:
    import torch
    import transformers

    from tunesmith.demo.base_model import byte_tokenizer

    transformers.utils.logging.disable_progress_bar()
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 2048
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    print(f"base: random Llama, {sum(each.numel() for each in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_adapter(base: Path, folder: Path, seed: int) -> str:
    """A published LoRA of rank 8 on every linear layer; its digest."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for name, tensor in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(tensor, std=0.05)
    staged = folder.with_name(f".{folder.name}")
    adapted.save_pretrained(staged)
    return publish_folder(staged, folder).digest


@dataclass
class Site:
    """A workspace with versions of one profile, and the server on it."""

    client: Client
    versions: list[adapters.Adapter]
    url: str = ""
    process: subprocess.Popen[bytes] | None = None
    token: str = ""
    live: int | None = None

    def flip(self, number: int) -> None:
        """Make a version live, as a deployment does: one transaction, then the server is told to look."""
        before = None if self.live is None else self.versions[self.live]
        with self.client._session.database.write() as tx:
            if before is not None:
                deployments.roll_back(tx, PROFILE, actor="bench", reason="the benchmark goes on")
            fresh = adapters.register(
                tx,
                PROFILE,
                run_id=None,
                path=self.versions[number].path,
                digest=self.versions[number].digest,
                base_digest=self.versions[number].base_digest,
                metrics={},
                actor="bench",
            )
            deployments.flip(
                tx, fresh, baseline=deployments.live_digest(tx, PROFILE), targets=[], actor="bench", reason="bench"
            )
        self.versions[number] = fresh
        self.live = number
        if self.url:
            told = httpx2.post(
                f"{self.url}/control/flip",
                json={"profile": PROFILE},
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=60,
            )
            if told.status_code != 200 or told.json()["live"]["name"] != fresh.name:
                raise SystemExit(f"{fresh.name} was flipped and is not served: {told.text}")


def build(folder: Path, hidden: int, layers: int) -> Site:
    Client.init(folder / "ws").close()
    root = folder / "ws"
    base = root / "models" / "bench"
    build_base(base, hidden, layers)
    profile = {"name": PROFILE, "role": "assistant", "base": {"path": "models/bench", "family": "llama"}}
    (root / "profiles" / f"{PROFILE}.yaml").write_text(yaml.safe_dump(profile))
    client = Client(root, actor="user:bench")
    client.profiles.lock(PROFILE)
    made = []
    base_is = base_digest(base)
    for number in range(NUM_VERSIONS):
        where = f"adapters/bench-{number}"
        digest = build_adapter(base, root / ".tunesmith" / where, number)
        with client._session.database.write() as tx:
            made.append(
                adapters.register(
                    tx, PROFILE, run_id=None, path=where, digest=digest, base_digest=base_is, metrics={}, actor="bench"
                )
            )
    return Site(client, made)


@contextmanager
def serving(site: Site, log: Path) -> Iterator[None]:
    root = site.client.workspace.root
    with log.open("wb") as sink:
        site.process = subprocess.Popen(
            [sys.executable, "-m", "tunesmith.cli.main", "--workspace", str(root), "serve", "--port", "0"],
            stdout=sink,
            stderr=sink,
        )
    try:
        card = _card(root, site.process, log)
        site.url, site.token = str(card["url"]), str(card["token"])
        yield
    finally:
        site.url = ""
        site.process.send_signal(signal.SIGTERM)
        try:
            site.process.wait(30)
        except subprocess.TimeoutExpired:
            site.process.kill()


def _card(root: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Where the server says who it is."""
    for _ in range(600):
        for card in (root / ".tunesmith" / "serve").glob("*.json"):
            return dict(json.loads(card.read_text()))
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def a_prompt(number: int) -> str:
    draw = random.Random(number)
    return f"{number}: {PROMPT}{' '.join(draw.choices(WORDS, k=draw.randint(2, 12)))}"


def asked(number: int, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": a_prompt(number)}]
    return {"model": PROFILE, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def measure_capture(site: Site, num_blocks: int, max_tokens: int) -> dict[str, Any]:
    """Blocks of the same requests, kept and not kept, in changing order; one at a time, so that nothing else waits.

    In blocks, because an answer is stored while the next one is written: that is where its cost falls.
    """
    pairs: list[tuple[float, float]] = []
    with httpx2.Client(base_url=site.url, timeout=60) as http:
        for block in range(-1, num_blocks):
            took = {}
            for consent in ("yes", "no") if block % 2 else ("no", "yes"):
                time.sleep(0.25)  # what the block before left to be stored is stored
                took[consent] = statistics.median(_block(http, consent, block, max_tokens))
            if block >= 0:
                pairs.append((took["yes"], took["no"]))
    draws = random.Random(1)
    overheads = sorted(_overhead(draws.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {
        "kept_ms": 1000 * statistics.median(kept for kept, _ in pairs),
        "not_kept_ms": 1000 * statistics.median(other for _, other in pairs),
        "overhead_percent": _overhead(pairs),
        "overhead_interval_percent": [overheads[50], overheads[1949]],
        "num_requests": 2 * PER_BLOCK * num_blocks,
    }


def _overhead(pairs: list[tuple[float, float]]) -> float:
    """How much longer a kept answer takes, in percent."""
    return 100 * statistics.median(kept / other - 1 for kept, other in pairs)


def _block(http: httpx2.Client, consent: str, block: int, max_tokens: int) -> list[float]:
    seconds = []
    for number in range(PER_BLOCK):
        start = time.perf_counter()
        answer = http.post(
            "/v1/chat/completions",
            json=asked(PER_BLOCK * block + number, max_tokens),
            headers={"X-Tunesmith-Consent": consent},
        )
        seconds.append(time.perf_counter() - start)
        if answer.status_code != 200:
            raise SystemExit(f"the server answered {answer.status_code}: {answer.text[:2000]}")
    return seconds


async def measure_engine_alone(site: Site, num: int, max_tokens: int) -> float:
    """The same requests to an engine process of our own, without HTTP: the median, in milliseconds."""
    from tunesmith.deployment.targets.base import ServedAdapter
    from tunesmith.serving.engine_spec import EngineSpec
    from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
    from tunesmith.serving.generation import GenerationRequest

    root = site.client.workspace.root
    spec = EngineSpec(
        base=str(root / "models" / "bench"), weights=None, weights_digest=None, device="auto", max_batch=32
    )
    engine = EmbeddedEngine(spec, max_memory_gb=None)
    version = site.versions[site.live or 0]
    await engine.start()
    try:
        await engine.load(ServedAdapter(version.name, root / ".tunesmith" / version.path, version.digest))
        seconds = []
        for number in range(-4, num):
            messages = [{"role": "user", "content": a_prompt(number)}]
            generation = GenerationRequest(
                f"g{number}", version.name, messages=messages, max_tokens=max_tokens, temperature=0.0
            )
            start = time.perf_counter()
            async for _ in engine.generate(generation):
                pass
            if number >= 0:
                seconds.append(time.perf_counter() - start)
    finally:
        await engine.stop()
    return 1000 * statistics.median(seconds)


@dataclass
class Seen:
    """What the clients saw while versions changed."""

    seconds: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answers: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)


async def measure_switch(site: Site, num_clients: int, num_flips: int, max_tokens: int) -> dict[str, Any]:
    """Ask all the time while the live version changes; in `answers`, all texts of one prompt by one content."""
    seen, over = Seen(), asyncio.Event()
    content_of = {version.name: number for number, version in enumerate(site.versions)}
    limits = httpx2.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx2.AsyncClient(base_url=site.url, timeout=120, limits=limits) as http:
        clients = [asyncio.create_task(_ask(http, seen, over, place, max_tokens)) for place in range(num_clients)]
        await asyncio.sleep(1.0)
        quiet = len(seen.seconds)
        flips = []
        for number in range(num_flips):
            start = time.perf_counter()
            await asyncio.to_thread(site.flip, number % len(site.versions))
            flips.append(time.perf_counter() - start)
            content_of[site.versions[number % len(site.versions)].name] = number % len(site.versions)
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        over.set()
        await asyncio.gather(*clients)
    mixed = _mixed(seen, content_of)
    ordered = sorted(seen.seconds)
    gaps = [later - earlier for earlier, later in zip(sorted(seen.ends), sorted(seen.ends)[1:], strict=False)]
    return {
        "num_clients": num_clients,
        "num_flips": num_flips,
        "num_answers": len(seen.seconds),
        "num_before_flips": quiet,
        "num_versions_seen": len(seen.versions),
        "num_failed": len(seen.failed),
        "first_failure": seen.failed[0] if seen.failed else None,
        "num_mixed": mixed,
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
        "longest_pause_ms": 1000 * max(gaps),
        "flip_to_live_ms": 1000 * statistics.median(flips),
    }


async def _ask(http: httpx2.AsyncClient, seen: Seen, over: asyncio.Event, place: int, max_tokens: int) -> None:
    number = 0
    while not over.is_set():
        number += 1
        which = (7 * place + number) % 40  # the same prompts again and again, so that answers can be compared
        start = time.perf_counter()
        try:
            response = await http.post("/v1/chat/completions", json=asked(which, max_tokens))
            response.raise_for_status()
            body = response.json()
        except (httpx2.HTTPError, ValueError) as error:
            seen.failed.append(f"{type(error).__name__}: {error} after {time.perf_counter() - start:.2f} s")
            continue
        now = time.perf_counter()
        seen.seconds.append(now - start)
        seen.ends.append(now)
        seen.versions.add(body["model"])
        seen.answers.setdefault((body["model"], which), set()).add(body["choices"][0]["message"]["content"])


def _mixed(seen: Seen, content_of: dict[str, int]) -> int:
    """Greedy answers of one content to one prompt must be one text, whichever name and batch they had."""
    texts: dict[tuple[int, int], set[str]] = {}
    for (name, which), said in seen.answers.items():
        texts.setdefault((content_of[name], which), set()).update(said)
    return sum(len(said) - 1 for said in texts.values())


def peft_load_ms(site: Site) -> float:
    """What loading one of these adapters takes with peft itself, while nothing is answered."""
    import transformers
    from peft import PeftModel

    root = site.client.workspace.root
    folders = [str(root / ".tunesmith" / version.path) for version in site.versions]
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "models" / "bench")
    adapted = PeftModel.from_pretrained(model, folders[0], adapter_name="v0")
    seconds = []
    for number in range(1, 9):
        start = time.perf_counter()
        adapted.load_adapter(folders[number % len(folders)], adapter_name=f"v{number}")
        adapted.set_adapter(f"v{number}")
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and under a minute")
    options = parser.parse_args()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft", "fastapi")]
    print(f"command: {' '.join(['python', *sys.argv])}")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"versions: {', '.join(versions)}", flush=True)
    hidden, layers = (192, 4) if options.quick else (384, 8)
    blocks, max_tokens = (6, 24) if options.quick else (40, 32)
    clients, flips = (8, 20) if options.quick else (50, 200)
    with tempfile.TemporaryDirectory(prefix="tunesmith-serving-") as name:
        site = build(Path(name), hidden, layers)
        site.flip(0)
        with serving(site, Path(name) / "server.log"):
            capture = measure_capture(site, blocks, max_tokens)
            print(f"capture: {json.dumps(capture)}", flush=True)
            switch = asyncio.run(measure_switch(site, clients, flips, max_tokens))
            print(f"switch:  {json.dumps(switch)}", flush=True)
            if switch["num_failed"]:
                print((Path(name) / "server.log").read_text()[-4000:])
        alone_ms = asyncio.run(measure_engine_alone(site, 4 * blocks, max_tokens))
        switch["peft_load_ms"] = peft_load_ms(site)
        site.client.close()
    from serving_engine import measure

    engine = measure(options.quick)
    print(f"engine:  {json.dumps(engine)}", flush=True)
    capture["engine_alone_ms"] = alone_ms
    ratios = {
        "capture on / off": round(1 + capture["overhead_percent"] / 100, 4),
        "whole server / engine alone": round(capture["kept_ms"] / alone_ms, 4),
        **engine.get("ratios", {}),
    }
    figures = {"capture": _rounded(capture), "switch": _rounded(switch), "engine": engine.get("figures", engine)}
    print(json.dumps({"name": "serving", "ratios": ratios, "figures": figures}))


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 2)
        if isinstance(value, float)
        else [round(each, 2) for each in value]
        if isinstance(value, list)
        else value
        for key, value in values.items()
    }


if __name__ == "__main__":
    main()
