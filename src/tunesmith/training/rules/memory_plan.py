"""How a training fits its device, and why: the pack size, and the number of activation-checkpointed layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tunesmith.profiles.architecture import ModelShape
from tunesmith.profiles.profile import Method, Recipe
from tunesmith.training.rules.memory_forecast import (
    CONSTANTS,
    Forecast,
    ForecastInputs,
    forecast,
    forecast_inputs,
    is_nf4,
    rounded,
    shape_key,
    size_text,
)

UNPLANNED_PACK_TOKENS = 4096
"""Most tokens of a pass where the device does not decide: on a CPU larger ones are not faster, TRL plans nothing."""
_LARGEST_PACK = 65_536
_USEFUL_PACK = 4096
"""Passes smaller than this leave a GPU idle: computing some layers again costs less."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a training will use its device, and why so."""

    key: str
    """Runs with the same key need the same but for pack, rank and checkpointed layers: their peaks teach each other."""
    pack_tokens: int
    """Most tokens of one pass."""
    checkpointed_layers: int
    num_layers: int
    is_fast: bool
    """Which way it takes to compute; the other one needs another plan."""
    forecast: Forecast
    limit_bytes: int
    """What the run may use, head-room included."""
    correction: float
    reason: str
    refusal: str | None = None
    """Why it cannot run at all, and what to change."""


@dataclass(frozen=True)
class _Choice:
    pack: int
    layers: int
    why: str


class _Room:
    """What fits into a device, for one training."""

    def __init__(
        self,
        shape: ModelShape,
        recipe: Recipe,
        method: Method,
        inputs: ForecastInputs,
        device_bytes: int,
        sizes: tuple[int, int],
    ) -> None:
        self._shape, self._recipe, self._method, self._terms = shape, recipe, method, inputs
        self._longest, self._largest_step = sizes
        self.usable = int(device_bytes * (1.0 - CONSTANTS.headroom))

    def forecast(self, pack: int, layers: int) -> Forecast:
        """Of passes of at most `pack` tokens: an item that is longer has its own, and no step has more than it has."""
        tokens = max(self._longest, min(pack, self._largest_step))
        return forecast(self._shape, self._recipe, self._method, tokens, layers, self._terms)

    def fits(self, pack: int, layers: int) -> bool:
        return self.forecast(pack, layers).total <= self.usable

    def fewest_layers(self, pack: int) -> int | None:
        """The fast path checkpoints any number of layers, transformers all or none."""
        most = self._shape.num_layers
        choices = range(most + 1) if self._terms.is_fast else (0, most)
        return next((layers for layers in choices if self.fits(pack, layers)), None)


def plan(
    shape: ModelShape,
    recipe: Recipe,
    method: Method,
    device_bytes: int,
    longest_item: int,
    *,
    largest_step: int | None = None,
    inputs: ForecastInputs | None = None,
    divisor: int = 1,
) -> MemoryPlan:
    """The largest pass that fits without activation checkpointing; else with as few checkpointed layers as possible.

    `largest_step`: most tokens that this process sees in a step. `divisor`: 2 after a pass of this plan ran out of
    memory.
    """
    inputs = inputs or forecast_inputs(shape, recipe, method, "cuda")
    step = max(longest_item, recipe.batch_tokens if largest_step is None else largest_step)
    room = _Room(shape, recipe, method, inputs, device_bytes, (longest_item, step))
    packs = list(_packs(recipe, inputs, longest_item, step))
    choice = _choose(room, packs, recipe, shape.num_layers)
    refusal = None
    if choice is None:
        choice = _Choice(
            packs[-1], 0 if recipe.activation_checkpointing == "none" else shape.num_layers, "nothing fits"
        )
        refusal = _refusal(room.forecast(choice.pack, choice.layers), room, device_bytes, longest_item, recipe)
    elif divisor > 1:
        choice = _smaller(choice, divisor, longest_item, recipe, shape.num_layers)
    return MemoryPlan(
        key=shape_key(shape, recipe, method, inputs),
        pack_tokens=choice.pack,
        checkpointed_layers=choice.layers,
        num_layers=shape.num_layers,
        is_fast=inputs.is_fast,
        forecast=room.forecast(choice.pack, choice.layers),
        limit_bytes=device_bytes,
        correction=inputs.correction,
        reason=choice.why,
        refusal=refusal,
    )


def _packs(recipe: Recipe, inputs: ForecastInputs, longest: int, step: int) -> Iterator[int]:
    """Sizes to try, the largest first: all of a step, then powers of two and one and a half of them."""
    cap = recipe.micro_batch_tokens or (UNPLANNED_PACK_TOKENS if inputs.device == "cpu" else None)
    if cap is None:
        top = max(longest, min(rounded(step), _LARGEST_PACK))
    else:
        top = cap if recipe.micro_batch_tokens else max(longest, cap)
    ladder = sorted({size for power in range(4, 17) for size in (2**power, 3 * 2 ** (power - 1))}, reverse=True)
    least = min(longest, top)
    yield from dict.fromkeys([top, *(size for size in ladder if least <= size < top), least])


def _choose(room: _Room, packs: Sequence[int], recipe: Recipe, num_layers: int) -> _Choice | None:
    mode, least = recipe.activation_checkpointing, min(packs[0], max(_USEFUL_PACK, packs[-1]))
    if mode == "all":
        pack = _first(pack for pack in packs if room.fits(pack, num_layers))
        return (
            None
            if pack is None
            else _Choice(pack, num_layers, "the profile asks for activation checkpointing of every layer")
        )
    useful = [pack for pack in packs if pack >= least]
    pack = _first(pack for pack in (packs if mode == "none" else useful) if room.fits(pack, 0))
    if pack is not None:
        why = "the largest useful pass fits" if pack == packs[0] else f"passes of {packs[0]} tokens do not fit"
        return _Choice(pack, 0, f"{why}; nothing is computed twice")
    if mode == "none":
        return None
    for pack in [useful[-1], *(pack for pack in packs if pack < least)]:
        layers = room.fewest_layers(pack)
        if layers is not None:
            kept = f"{useful[-1]} tokens fit only with {layers} of {num_layers} layers activation-checkpointed"
            small = f"not even with every layer activation-checkpointed {useful[-1]} tokens fit"
            return _Choice(pack, layers, kept if pack == useful[-1] else small)
    return None


def _first(packs: Iterable[int]) -> int | None:
    return next(iter(packs), None)


def _smaller(choice: _Choice, divisor: int, longest: int, recipe: Recipe, num_layers: int) -> _Choice:
    """After running out of memory: half of the pass, and where the longest example is larger, nothing is kept."""
    pack, why = max(1, choice.pack // divisor), f"ran out of memory with passes of {choice.pack} tokens"
    if pack < longest and recipe.activation_checkpointing == "auto":
        return replace(choice, pack=pack, layers=num_layers, why=f"{why}, and no pass is smaller than an example")
    return replace(choice, pack=pack, why=why)


def _refusal(least: Forecast, room: _Room, device_bytes: int, longest: int, recipe: Recipe) -> str:
    """What it needs at the least, what there is, and what would help, the most helpful first."""
    ways, usable = [], room.usable
    if least.fixed <= usable or least.moving > least.weights:
        ways.append(f"lower recipe.max_length (the longest example has {longest} tokens)")
    if recipe.activation_checkpointing == "none":
        ways.append("set recipe.activation_checkpointing: auto")
    if recipe.tuning == "full":
        ways.append("set recipe.tuning: lora")
    elif not is_nf4(recipe):
        ways.append("set recipe.quantize: nf4")
    if recipe.tuning == "lora" and least.trained > least.total // 10:
        ways.append(f"lower recipe.lora_rank ({recipe.lora_rank})")
    ways.append("use a device with more memory, or raise hardware.memory_gb if it has more than that says")
    return (
        f"this training needs {size_text(least.total)} at the least (weights {size_text(least.weights)}, trained "
        f"{size_text(least.trained)}, one pass {size_text(least.moving)}), and may use {size_text(usable)} of "
        f"{size_text(device_bytes)}: {'; or '.join(ways)}"
    )
