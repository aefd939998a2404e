"""The memory plan of a training before it loads its base, and how the measured peak compares with it."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tunesmith.core.errors import ConfigError
from tunesmith.models.packs import Item
from tunesmith.profiles.architecture import read_shape
from tunesmith.programs.device.memory import usable_ram
from tunesmith.programs.protocol import Result
from tunesmith.runs.spec import TrainSpec
from tunesmith.training.rules.memory_forecast import (
    GB,
    ForecastInputs,
    forecast_inputs,
    measured_ratio,
    shape_key,
    size_text,
)
from tunesmith.training.rules.memory_plan import MemoryPlan, plan
from tunesmith.training.trainers.native.batch_sampler import BatchSampler
from tunesmith.training.trainers.native.distributed import TrainingGroup

_NUM_SAMPLED_STEPS = 200
"""Number of steps whose sizes are read: a larger step later makes one more pass, and needs no more memory."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that one process may use on its device, and what it held there before it loaded the base."""

    device: Literal["cuda", "cpu"]
    free_bytes: int
    process_bytes: int


class Planner:
    """Plans the memory of one training before any weight is loaded, and again if facts known only later require it.

    Every process of a group makes the same plan: for the process with the least memory.
    """

    def __init__(self, spec: TrainSpec, items: Sequence[Item], sampler: BatchSampler, group: TrainingGroup) -> None:
        self._spec, self._items, self._group = spec, items, group
        self._shape = read_shape(Path(spec.run.base.path))
        self._device_memory = _smallest(group.all_gather(_device_memory(group)))
        steps = range(min(sampler.num_steps, _NUM_SAMPLED_STEPS))
        self._largest_step = math.ceil(max(sampler.num_tokens(step) for step in steps) / group.size)

    def plan(self, *, is_fast: bool | None = None, with_embeddings: bool = False) -> MemoryPlan:
        """Return the plan. Raises ConfigError if the training cannot fit, with the figures and what to change.

        `is_fast`: whether the fused backend computes, once that is known; `with_embeddings`: they are trained too.
        """
        run, memory = self._spec.run, self._device_memory
        recipe = run.recipe.model_copy(update={"train_embeddings": True}) if with_embeddings else run.recipe
        inputs = _inputs_of(
            self._items, recipe.packing, forecast_inputs(self._shape, recipe, run.method, memory.device)
        )
        inputs = replace(
            inputs, process_bytes=memory.process_bytes, is_fast=inputs.is_fast if is_fast is None else is_fast
        )
        key = shape_key(self._shape, recipe, run.method, inputs)
        made = plan(
            self._shape,
            recipe,
            run.method,
            memory.free_bytes if run.memory_gb is None else min(memory.free_bytes, int(run.memory_gb * GB)),
            max(_tokens_alone(item, recipe.packing) for item in self._items),
            largest_step=self._largest_step,
            inputs=replace(inputs, correction=self._spec.memory_corrections.get(key, 1.0)),
            divisor=self._spec.micro_batch_divisor,
        )
        if made.refusal is not None:
            raise ConfigError(made.refusal)
        return made

    def replanned(self, made: MemoryPlan, *, is_fast: bool, with_embeddings: bool) -> MemoryPlan | None:
        """Return another plan if another backend computes than was planned, or embeddings are trained; else None.

        Every rank must call this; all plan for the slow path if any of them takes it.
        """
        recipe = self._spec.run.recipe
        more = with_embeddings and recipe.tuning == "lora" and recipe.train_embeddings is not True
        every = self._group.all_gather(is_fast)
        if all(every) == made.is_fast and not more:
            return None
        return self.plan(is_fast=all(every), with_embeddings=more)


def describe(made: MemoryPlan) -> str:
    """Return the plan as one log line."""
    return (
        f"memory: {size_text(made.forecast.total)} predicted of {size_text(made.limit_bytes)}; "
        f"micro-batches up to {made.pack_tokens} tokens; "
        f"{made.checkpointed_layers} of {made.num_layers} layers activation-checkpointed; {made.reason}"
    )


def with_memory(result: Result, made: MemoryPlan, log: Callable[[str], None]) -> Result:
    """Add the predicted and the measured peak to the result; they correct the forecasts of later runs."""
    measured = peak_bytes()
    log(f"memory: {size_text(measured)} at the peak, {size_text(made.forecast.total)} predicted")
    figures: dict[str, Any] = asdict(made) | {
        "measured_bytes": measured,
        "ratio": measured_ratio(made.forecast, made.correction, measured),
    }
    return result.model_copy(update={"detail": result.detail | {"memory": figures}})


def peak_bytes() -> int:
    """Return the peak memory of this process on its device."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_memory(group: TrainingGroup) -> DeviceMemory:
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        together = math.ceil(group.size / torch.cuda.device_count())
        held = int(torch.cuda.memory_allocated())
        return DeviceMemory("cuda", (free + torch.cuda.memory_reserved()) // together, held)
    return DeviceMemory("cpu", usable_ram() // group.size, _status_bytes("VmRSS"))


def _smallest(memories: Sequence[DeviceMemory]) -> DeviceMemory:
    return DeviceMemory(
        memories[0].device,
        min(memory.free_bytes for memory in memories),
        max(memory.process_bytes for memory in memories),
    )


def _status_bytes(name: str) -> int:
    """A line of this process's /proc status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _inputs_of(items: Sequence[Item], is_packing: bool, inputs: ForecastInputs) -> ForecastInputs:
    """Return the forecast inputs with what only the data can say."""
    wanted = sum(item.num_trained + (item.num_context if item.counts_context else 0) for item in items)
    num_tokens = sum(_tokens_alone(item, is_packing) for item in items)
    shares = is_packing and any(item.prompt and len(item.completions) > 1 for item in items)
    return replace(inputs, wanted_share=min(1.0, wanted / num_tokens), shares_prompts=shares)


def _tokens_alone(item: Item, is_packing: bool) -> int:
    """Tokens of a pass with nothing else in it, padding included."""
    return len(item) if is_packing else len(item.completions) * item.longest
