"""What each kind of target can serve of an adapter, so that nothing is trained for hours that cannot be loaded.

Read from the servers' own sources: vLLM (`lora/peft_helper.py`, `config/lora.py`) refuses DoRA, biases, modules_to_save
and a rank above the one it was started with; llama.cpp's converter takes nothing but pairs of A and B, and its GGUF
scales by alpha / rank whatever the adapter's config says; Ollama serves the same files. PEFT loads everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.profiles.profile import Recipe, TargetSettings

FOR = "for"
"""Option of a directory target: the kind of server that reads the folder."""
MAX_RANK = "max_lora_rank"
"""Option of a target that serves vLLM: the `--max-lora-rank` it was started with."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The only values that vLLM takes for it."""


@dataclass(frozen=True)
class ServingLimits:
    """What one kind of server takes."""

    server: str
    """How people call it."""
    default_rank: int | None = None
    """Highest rank unless `max_lora_rank` says that the server was started with another; None: any rank."""
    rslora: bool = True
    dora: bool = True
    bias: bool = True
    embeddings: bool = True
    """Whole modules beside the low-rank pairs (modules_to_save): trained embeddings."""


LIMITS: dict[str, ServingLimits] = {
    "directory": ServingLimits("whoever reads the folder"),
    "embedded": ServingLimits("peft"),
    "vllm": ServingLimits("vLLM", default_rank=16, dora=False, bias=False, embeddings=False),
    "llamacpp": ServingLimits("llama.cpp", rslora=False, dora=False, bias=False, embeddings=False),
    "ollama": ServingLimits("Ollama", rslora=False, dora=False, bias=False, embeddings=False),
    "command": ServingLimits("a program of yours"),
}
"""By kind of target. A kind that is not listed (from another package) is not limited here: it has a trial load."""


@dataclass(frozen=True)
class _Shape:
    """What a server looks at before it loads an adapter."""

    rank: int
    rslora: bool
    dora: bool
    bias: bool
    embeddings: bool
    alpha: float


def limit_violations(recipe: Recipe, targets: Sequence[TargetSettings]) -> list[str]:
    """What of the recipe the targets cannot serve, one line each: field, target, limit, what to set.

    `train_embeddings: auto` is no violation: it is decided with the targets in mind.
    """
    shape = _Shape(
        rank=recipe.lora_rank,
        rslora=recipe.rslora,
        dora=recipe.dora,
        bias=False,
        embeddings=recipe.train_embeddings is True,
        alpha=recipe.lora_alpha,
    )
    lines: list[str] = []
    for target in targets:
        if recipe.tuning == "full" and (target.kind != "directory" or FOR in target.options):
            lines.append(f"recipe.tuning: {whole_model_refusal(target.name)}; set recipe.tuning: lora")
        problem = option_problem(target.kind, target.options)
        if problem is not None:
            lines.append(f"targets.{target.name}.options.{problem}")
            continue
        lines += [f"recipe.{line}" for line in _refused(shape, target.name, target.kind, target.options)]
    return lines


def whole_model_refusal(name: str) -> str:
    return f"target {name} serves adapters on a base that stays loaded, and full tuning makes a model of its own"


def adapter_violations(config: Mapping[str, Any], target: TargetSettings) -> list[str]:
    """What of an adapter (its adapter_config.json) the target cannot serve, one line each."""
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    shape = _Shape(
        rank=max((rank for rank in ranks if isinstance(rank, int)), default=0),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        bias=config.get("bias", "none") != "none" or bool(config.get("lora_bias")),
        embeddings=bool(config.get("modules_to_save")),
        alpha=float(config.get("lora_alpha") or 0.0),
    )
    return _refused(shape, target.name, target.kind, target.options)


def without_embeddings(targets: Sequence[TargetSettings]) -> tuple[str, ...]:
    """Names of the targets that cannot serve trained embeddings."""
    return tuple(target.name for target in targets if not _limits(target.kind, target.options).embeddings)


def option_problem(kind: str, options: Mapping[str, Any]) -> str | None:
    """What is wrong with the options that say who serves, or None; begins with the option's name."""
    served = options.get(FOR)
    if kind == "directory" and served is not None and served not in _SERVERS:
        return f"{FOR}: no kind of server {quoted(str(served))}{did_you_mean(str(served), _SERVERS)}"
    rank = options.get(MAX_RANK)
    if rank is None:
        return None
    if _limits(kind, options).default_rank is None:
        return f"{MAX_RANK}: only a target for vllm has it; remove it"
    if type(rank) is not int or rank not in VLLM_RANKS:
        return f"{MAX_RANK}: {quoted(str(rank))} is not one of {', '.join(map(str, VLLM_RANKS))}, all that vLLM takes"
    return None


_SERVERS = tuple(kind for kind in LIMITS if kind != "directory")


def _limits(kind: str, options: Mapping[str, Any]) -> ServingLimits:
    served = options.get(FOR, kind) if kind == "directory" else kind
    return LIMITS.get(str(served), LIMITS["directory"])


def _refused(shape: _Shape, name: str, kind: str, options: Mapping[str, Any]) -> list[str]:
    limits = _limits(kind, options)
    who = f"target {name} ({limits.server})"
    lines: list[str] = []
    max_rank = limits.default_rank and int(options.get(MAX_RANK, limits.default_rank))
    if max_rank is not None and shape.rank > max_rank:
        enough = next((rank for rank in VLLM_RANKS if rank >= shape.rank), VLLM_RANKS[-1])
        lines.append(
            f"lora_rank: {shape.rank} is more than {who} loads, {max_rank}; set recipe.lora_rank: {max_rank}, or start "
            f"the server with --max-lora-rank {enough} and say so: targets.{name}.options.{MAX_RANK}: {enough}"
        )
    if shape.rslora and not limits.rslora:
        same = shape.alpha * math.sqrt(max(1, shape.rank))
        lines.append(
            f"rslora: {who} scales every adapter by alpha / rank; set recipe.rslora: false and "
            f"recipe.lora_alpha: {same:.6g}, which trains the same"
        )
    if shape.dora and not limits.dora:
        lines.append(f"dora: {who} cannot load DoRA; set recipe.dora: false")
    if shape.bias and not limits.bias:
        lines.append(f"bias: {who} cannot load trained biases; train without them")
    if shape.embeddings and not limits.embeddings:
        lines.append(
            f"train_embeddings: {who} cannot load trained embeddings (modules_to_save); set "
            "recipe.train_embeddings: false, or auto, which leaves them alone for such a target"
        )
    return lines
