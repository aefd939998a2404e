"""Forecasts how much memory a training will take.

What a training holds is of two kinds. *Fixed*: the program, the base's weights, what is trained with its gradients and
moments. *Moving*: what grows with the tokens of one pass. `forecast` adds them up for one size of pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from tunesmith.models.fast import FAST_FAMILIES
from tunesmith.profiles.architecture import ModelShape
from tunesmith.profiles.profile import HardwareTier, Method, Recipe

GB = 2**30
"""As devices are sold and nvidia-smi counts: a 24 GB card has 24 · 2^30 bytes."""
TIER_GB = {HardwareTier.SMALL_GPU: 12.0, HardwareTier.CONSUMER_GPU: 24.0, HardwareTier.DATACENTER_GPU: 80.0}
"""What a forecast takes for granted about a tier before a device is there to be asked."""

_MIN_CORRECTION, _MAX_CORRECTION = 0.5, 2.0


@dataclass(frozen=True)
class _Constants:
    """What the formulas cannot know: one line and one reason each, to be held against measured peaks."""

    headroom: float = 0.06
    """Of the device, left free: the allocator's blocks never fit without gaps, and libraries keep workspaces."""
    plain_on_cuda: float = 2.06
    """transformers and peft keep casts, norms and products that the fast path computes again: so many times as much.
    Fitted to four peaks on an H200, from 0.6 to 8 billion parameters; the worst is 7 % off."""
    plain_activations: float = 2.2
    """The same on a CPU, where peft's part is counted apart."""
    plain_outputs: float = 2.15
    """Bytes per output value of each matrix with an adapter: peft adds to a second copy; measured on a CPU."""
    plain_dropout: float = 2.75
    """Bytes per input value of each of them under dropout: its own copy and mask; measured on a CPU."""
    plain_head: float = 3.0
    """Logits, their fp32 copy and its gradient lie there at once where the loss is not fused."""
    head_chunk_rows: int = 4096
    """Rows of logits that the fused loss holds at a time; their gradients take the same place."""
    ranks_rounded_to: int = 64
    """Adapters on the same input are one product, as wide as the hardware likes it."""
    tokens_rounded_to: int = 256
    """A pass on CUDA is filled up to a multiple of this, so that few shapes occur."""
    backward_gate: float = 8.0
    """Bytes per inner value of the MLP while its backward runs: activation, its gradient, those of gate and up."""
    backward_hidden: float = 4.0
    """Bytes per hidden value meanwhile: the gradient that comes in and the one that goes out."""
    shared_keys: float = 1.5
    """Keys gathered per token where answers share a prompt: their own, and the prompt's for each answer."""
    preference: float = 1.01
    """Preference methods hold sums and references per answer beside what sft holds."""
    nf4_bytes: float = 0.53
    """Per weight: four bits, and the scales of its block of 64, quantised themselves."""
    preflight_rows: int = 512
    preflight_bytes: float = 10.0
    """Per value of the vocabulary and row that the preflight looks at: logits, in fp32, and as log-probabilities."""
    update_bytes: float = 8.0
    """Per trained number at the update: a copy from before, and the difference, for the size of the step."""
    program_bytes: float = 0.7 * GB
    """Interpreter, libraries and tokenised data of the program, where no process was there to be asked."""


CONSTANTS = _Constants()


@dataclass(frozen=True)
class ForecastInputs:
    """What the memory of a training depends on, apart from its model shape and recipe."""

    device: Literal["cuda", "cpu"] = "cuda"
    is_fast: bool = True
    """Whether our own layers compute it, or transformers and peft do."""
    wanted_share: float = 1.0
    """Of the tokens, those whose log-probability is wanted; all of them where nobody has counted yet."""
    shares_prompts: bool = False
    """Whether answers share the computation of their prompt."""
    process_bytes: int = 0
    """What the program itself holds on that device before it loads the base."""
    correction: float = 1.0
    """What earlier runs of the same shape took, as a multiple of what was predicted for the moving part."""


@dataclass(frozen=True)
class Forecast:
    """Bytes at the peak, by what holds them."""

    process: int
    weights: int
    trained: int
    activations: int
    head: int
    transient: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.fixed + self.moving)

    @property
    def fixed(self) -> int:
        return self.process + self.weights + self.trained

    @property
    def moving(self) -> int:
        return self.activations + self.head + self.transient


def forecast_inputs(
    shape: ModelShape, recipe: Recipe, method: Method, device: Literal["cuda", "cpu"]
) -> ForecastInputs:
    """What can be known without data and device: pairs share their prompt, and which path computes."""
    is_fast = device == "cuda" and shape.family in FAST_FAMILIES and _is_plain_lora(shape, recipe)
    shares = recipe.packing and method in (Method.DPO, Method.ORPO)
    process = CONSTANTS.program_bytes if device == "cpu" else 0
    return ForecastInputs(device=device, is_fast=is_fast, shares_prompts=shares, process_bytes=int(process))


def _is_plain_lora(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether nothing is trained but adapters on the layers' projections, without dropout."""
    if (
        not recipe.fast_path
        or recipe.tuning != "lora"
        or recipe.dora
        or recipe.lora_dropout
        or recipe.train_embeddings is True
    ):
        return False
    return recipe.target_modules == "all-linear" or all(
        name.rpartition(".")[2] in shape.matrices() for name in recipe.target_modules
    )


def shape_key(shape: ModelShape, recipe: Recipe, method: Method, inputs: ForecastInputs) -> str:
    parts = [
        f"{shape.family}-{shape.num_layers}x{shape.hidden}-i{shape.intermediate}",
        f"a{shape.num_heads}.{shape.num_kv_heads}.{shape.head_size}-v{shape.vocab_size}",
        method.value,
        recipe.tuning,
        *(["nf4"] if is_nf4(recipe) else []),
        inputs.device,
        "fast" if inputs.is_fast else "plain",
    ]
    return "-".join(parts)


def correction_of(ratios: Sequence[float]) -> float:
    """One factor from what earlier runs of a shape took; 1 where there are none."""
    known = [ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0]
    return min(_MAX_CORRECTION, max(_MIN_CORRECTION, median(known))) if known else 1.0


def measured_ratio(forecast: Forecast, correction: float, measured: int) -> float | None:
    """What the moving part took, as a multiple of what was predicted before any correction; None if nothing was."""
    predicted = forecast.moving / correction
    return max(0.0, measured - forecast.fixed) / predicted if predicted > 0 else None


def forecast(
    shape: ModelShape,
    recipe: Recipe,
    method: Method,
    pack_tokens: int,
    checkpointed_layers: int = 0,
    inputs: ForecastInputs | None = None,
) -> Forecast:
    """The peak of a training whose largest pass has so many tokens."""
    inputs = inputs or forecast_inputs(shape, recipe, method, "cuda")
    if inputs.device == "cuda":
        pack_tokens = rounded(pack_tokens)
    scale = inputs.correction * (1.0 if method is Method.SFT else CONSTANTS.preference)
    width = 1.0 if inputs.device == "cuda" else 2.0  # the formulas count bf16; a CPU computes in fp32
    kept = _kept_per_token(shape, recipe, inputs) * width
    at_rest = 2.0 * shape.hidden * width
    num_kept = shape.num_layers - checkpointed_layers
    streams = 2 if inputs.is_fast else 1  # in front of a layer of ours, what the last one adds is not added yet
    activations = pack_tokens * (kept * num_kept + at_rest * (streams * checkpointed_layers + 1))
    wanted = pack_tokens * inputs.wanted_share
    backward = CONSTANTS.backward_gate * shape.intermediate + CONSTANTS.backward_hidden * shape.hidden
    in_layer = pack_tokens * (backward * width + (kept if checkpointed_layers else 0.0))
    if inputs.is_fast:
        head = wanted * at_rest
        in_head = min(wanted, CONSTANTS.head_chunk_rows) * shape.vocab_size * 2.0
    else:
        head = wanted * shape.vocab_size * 4.0 * CONSTANTS.plain_head
        in_head = 0.0
    num_trained, weights, trained = _fixed(shape, recipe, inputs)
    in_layer += _unpacked(shape, recipe) * width
    # logits that are held whole are given back before the layers' backward begins
    transient = max(in_layer, in_head) if inputs.is_fast else max(0.0, in_layer - head)
    # before the first step the preflight looks; the update comes after the backward, which has given everything back
    looking = min(pack_tokens, CONSTANTS.preflight_rows) * shape.vocab_size * CONSTANTS.preflight_bytes
    moving = max(activations + head + transient, looking, num_trained * CONSTANTS.update_bytes)
    return Forecast(
        process=inputs.process_bytes,
        weights=int(weights),
        trained=int(trained),
        activations=int(activations * scale),
        head=int(head * scale),
        transient=int(moving * scale) - int(activations * scale) - int(head * scale),
    )


def _kept_per_token(shape: ModelShape, recipe: Recipe, inputs: ForecastInputs) -> float:
    """Bytes that one layer keeps of one token for its backward, in bf16."""
    query, key = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    kept = 2.0 * shape.hidden  # what comes in
    kept += 2 * (query + key) if shape.has_qk_norm else 0  # before their norm
    kept += 2 * (query + 2 * key) + 2 * query + 4 * shape.num_heads  # q, k, v; attention's output; its logsumexp
    kept += 2 * shape.hidden + 4 * shape.intermediate + 8  # between the halves; gate and up; two norms
    if inputs.shares_prompts:
        kept += 4 * key * CONSTANTS.shared_keys  # k and v of the prompt, again for each answer
    if recipe.tuning == "full":
        return kept * CONSTANTS.plain_activations
    adapters = 2.0 * _num_ranks(shape, recipe)
    if inputs.is_fast:
        return kept + adapters
    if inputs.device == "cuda":
        kept, adapters = (kept + adapters) * CONSTANTS.plain_on_cuda / CONSTANTS.plain_activations, 0.0
    sizes = [shape.matrices()[name] for name in _adapted(shape, recipe)]
    adapters += CONSTANTS.plain_outputs * sum(num_out for _, num_out in sizes) if inputs.device == "cpu" else 0.0
    adapters += CONSTANTS.plain_dropout * sum(num_in for num_in, _ in sizes) if recipe.lora_dropout else 0.0
    return kept * CONSTANTS.plain_activations + adapters


def _num_ranks(shape: ModelShape, recipe: Recipe) -> int:
    """Inner values of the adapters of one layer, those on the same input rounded together."""
    adapted, unit = _adapted(shape, recipe), CONSTANTS.ranks_rounded_to
    inputs = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    nums = [recipe.lora_rank * sum(name in adapted for name in names) for names in inputs]
    return sum(-(-num // unit) * unit for num in nums)


def _fixed(shape: ModelShape, recipe: Recipe, inputs: ForecastInputs) -> tuple[float, float, float]:
    """How many numbers are trained; bytes of the weights, and of what training adds to them."""
    embeddings = shape.vocab_size * shape.hidden
    plain = 2.0 if inputs.device == "cuda" else 4.0
    if recipe.tuning == "full":  # in fp32: weight, gradient, two moments; on CUDA autocast's copy beside them
        copies = 2.0 if inputs.device == "cuda" else 0.0
        return shape.num_parameters, 4.0 * shape.num_parameters, (12.0 + copies) * shape.num_parameters
    num_linear = min(shape.num_in_layer * shape.num_layers, shape.num_parameters)
    weights = plain * shape.num_parameters
    if is_nf4(recipe):
        weights += (CONSTANTS.nf4_bytes - plain) * num_linear
    num_lora = _num_lora(shape, recipe)
    num_saved = embeddings * (1 if shape.is_tied else 2) if recipe.train_embeddings is True else 0
    copies = 2.0 if inputs.device == "cuda" else 0.0
    return num_lora + num_saved, weights, (16.0 + copies) * num_lora + 16.0 * num_saved


def _unpacked(shape: ModelShape, recipe: Recipe) -> float:
    """A quantised base has one layer's matrices whole at a time."""
    return 2.0 * shape.num_in_layer if is_nf4(recipe) else 0.0


def rounded(tokens: int) -> int:
    """What a pass of so many tokens is filled up to."""
    return -(-tokens // CONSTANTS.tokens_rounded_to) * CONSTANTS.tokens_rounded_to


def is_nf4(recipe: Recipe) -> bool:
    return recipe.quantize == "nf4"


def _adapted(shape: ModelShape, recipe: Recipe) -> list[str]:
    """Names of the layer's matrices that get an adapter."""
    if recipe.target_modules == "all-linear":
        return list(shape.matrices())
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    ends = [name.rpartition(".")[2] for name in recipe.target_modules]
    return list(dict.fromkeys(one for end in ends for one in parts.get(end, (end,)) if one in shape.matrices()))


def _num_lora(shape: ModelShape, recipe: Recipe) -> int:
    sizes, rank = shape.matrices(), recipe.lora_rank
    in_layer = sum(rank * sum(sizes[name]) + (sizes[name][1] if recipe.dora else 0) for name in _adapted(shape, recipe))
    num = in_layer * shape.num_layers
    if recipe.target_modules != "all-linear":
        outside = [name for name in recipe.target_modules if re.search(r"(embed_tokens|lm_head)\Z", name)]
        num += len(outside) * rank * (shape.vocab_size + shape.hidden)
    return num


def size_text(num_bytes: float) -> str:
    """In the unit that people use for it; 1 GB is 2^30 bytes."""
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 2**20:.0f} MB"
