"""Builders for tests of the embedded engine: tiny bases that say different things, adapters of every kind, one loop."""

from __future__ import annotations

import asyncio
import shutil
import threading
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from support.native import a_micro_base
from tunesmith.core.files import publish_folder
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

T = TypeVar("T")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "o_proj", "gate_proj"]},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["k_proj", "up_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "rank_pattern": {"layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 32},
        "target_modules": ["q_proj", "up_proj"],
    },
    "biased": {"r": 4, "lora_bias": True, "target_modules": ["v_proj", "down_proj"]},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "dora_embedding": {"r": 4, "use_dora": True, "target_modules": ["embed_tokens"]},
    "saved": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved_norm": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


def a_lively_base(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A random Llama whose answers differ with every prompt: larger weights than a fresh model has."""
    import torch
    from safetensors.torch import load_file, save_file

    a_micro_base(folder, tied=tied, seed=seed)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            weights[name] = tensor * (4.0 if "embed" in name or "lm_head" in name else 12.0)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def an_adapter(
    base: Path, folder: Path, kind: str = "plain", *, seed: int = 0, name: str | None = None
) -> ServedAdapter:
    """A published adapter with random weights that change what is said."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tunesmith.models.adapters import save_adapter
    from tunesmith.models.loading import load_base

    model = load_base(base, torch.device("cpu"))
    settings: dict[str, Any] = dict(KINDS[kind])
    tied = model.config.tie_word_embeddings and "lm_head" in settings.get("modules_to_save", ())
    staged = folder.with_name(folder.name + ".staged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft says about merging and shards, which nobody does here
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", ensure_weight_tying=tied, **settings))
        _shake(adapted, torch.Generator().manual_seed(seed))
        save_adapter(adapted, staged, base.name)
    manifest = publish_folder(staged, folder)
    shutil.rmtree(staged, ignore_errors=True)
    return ServedAdapter(name or f"{kind}@v{seed}", folder, manifest.digest)


def _shake(adapted: Any, random: Any) -> None:
    import torch

    for key, tensor in sorted(adapted.named_parameters()):
        if "lora_magnitude" in key:
            tensor.data *= 1 + 0.5 * torch.rand(tensor.shape, generator=random)
        elif "lora_" in key:
            tensor.data = 0.4 * torch.randn(tensor.shape, generator=random)
        elif ".modules_to_save." in key:
            tensor.data = tensor.data + 0.3 * torch.randn(tensor.shape, generator=random)


class Loop:
    """An event loop in a thread of its own, so that tests can share an engine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def asking(text: str, adapter: str | None = None, **changes: Any) -> GenerationRequest:
    """A greedy request for twenty tokens."""
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0}
    messages = None if "prompt" in changes else [{"role": "user", "content": text}]
    return GenerationRequest(id="asked", adapter=adapter, messages=messages, **(fields | changes))


async def whole_answer(engine: Any, asked: GenerationRequest) -> tuple[str, GenerationEnd]:
    """The text and how it ended."""
    texts: list[str] = []
    async for said in engine.generate(asked):
        if isinstance(said, TextDelta):
            texts.append(said.text)
        else:
            return "".join(texts), said
    raise AssertionError("the answer has no end")
