"""Serving on CUDA: answers as on the CPU, a device that is free while training has it, and serving that returns."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunesmith[train]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run `make gpu` on a GPU machine"),
]

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.engine import a_lively_base

    return a_lively_base(tmp_path_factory.mktemp("gpu-serving") / "base")


@pytest.fixture(scope="module")
def loop() -> Iterator[Any]:
    from support.engine import Loop

    loop = Loop()
    yield loop
    loop.close()


def used_mib() -> int:
    """What all processes of this machine hold on the first GPU, asked by a process that leaves nothing there."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed, so nobody can tell who holds the device")
    tokenizer = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(tokenizer, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.parametrize("kind", ["plain", "dora", "saved"])
def test_engine_on_cuda_reads_prompts_as_the_cpu_does(base: Path, loop: Any, tmp_path: Path, kind: str) -> None:
    from support.engine import an_adapter
    from tunesmith.serving.engine_spec import EngineSpec
    from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine

    adapter = an_adapter(base, tmp_path / "adapter", kind, seed=3)
    prompts = [[{"role": "user", "content": text}] for text in ("hello", "what is the date", "a")]
    readings = {}
    for device in ("cpu", "cuda"):
        engine = EmbeddedEngine(EngineSpec(base=str(base), device=device), max_memory_gb=None)
        loop.run(engine.load(adapter), 120)
        readings[device] = loop.run(engine.probe(adapter.name, prompts, NUM_TOKENS), 120)
        loop.run(engine.stop(0.0), 30)
    for ours, theirs in zip(readings["cuda"], readings["cpu"], strict=True):
        assert ours.prompt_ids == theirs.prompt_ids
        assert ours.log_probs is not None
        assert theirs.log_probs is not None
        assert abs(ours.log_probs[0] - theirs.log_probs[0]) < 0.3, "more than bf16 explains"


def test_device_is_free_while_training_has_it_and_serving_returns(base: Path, tmp_path: Path) -> None:
    """The real trainer on the real device: auto must see that both want it."""
    from support.hand_over_world import World
    from support.workspaces import wait_for

    before = used_mib()
    world = World(tmp_path, base, device="auto", shares_device="auto", unused_timeout_s=60.0)
    try:
        assert world.ask().model == "support@v1"
        serving = used_mib()
        assert serving > before + 100, "the engine is not on the device"
        shape = ("recipe.lora_rank=4", "recipe.lora_alpha=8", "recipe.target_modules=[q_proj, v_proj, down_proj]")
        run_id = world.submit("trainer.kind=native", "trainer.options={}", "hardware.tier=null", *shape)
        worker = world.fleet.start()
        world.until("aside", 120.0)
        wait_for(lambda: used_mib() < serving - 100 or world.trainers(), 60.0, "for the device to be free")
        assert world.engines() == [], "it trains beside the engine"
        assert world.fleet.wait(run_id, "completed", "rejected", timeout_s=240.0) in ("completed", "rejected")
        world.is_back()
        assert world.ask().model == "support@v1"
        assert worker.poll() is None
    finally:
        world.end()
