"""The memory plan of a training that is about to load its base: asked of the device, told, held against the peak."""

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
from tunesmith.programs.messages import Result
from tunesmith.runs.spec import TrainSpec
from tunesmith.training.rules.memory_forecast import GB, Terms, measured_ratio, shape_key, size_text, terms_for
from tunesmith.training.rules.memory_plan import MemoryPlan, plan
from tunesmith.training.trainers.native.batch_sampler import Order
from tunesmith.training.trainers.native.distributed import Team

_STEPS_LOOKED_AT = 200
"""The largest of so many steps stands for all: a step that is larger makes one more pass, and needs no more memory."""


@dataclass(frozen=True)
class Place:
    """What one process may use, and what it held there before it loaded the base."""

    device: Literal["cuda", "cpu"]
    free_bytes: int
    process_bytes: int


class Planner:
    """Plans one training, once before any weight is loaded, and again if what is known only then asks for it.

    Every process of a team comes to the same plan: that of the one with the least room.
    """

    def __init__(self, spec: TrainSpec, items: Sequence[Item], order: Order, team: Team) -> None:
        self._spec, self._items, self._team = spec, items, team
        self._shape = read_shape(Path(spec.run.base.path))
        self._place = _agreed(team.gathered(_place(team)))
        steps = range(min(order.num_steps, _STEPS_LOOKED_AT))
        self._largest_step = math.ceil(max(order.num_tokens(step) for step in steps) / team.size)

    def plan(self, *, is_fast: bool | None = None, with_embeddings: bool = False) -> MemoryPlan:
        """Raises what cannot fit, with the numbers and what to change.

        `is_fast`: which way computes, once an engine was there to be asked; `with_embeddings`: they are trained too.
        """
        run, place = self._spec.run, self._place
        recipe = run.recipe.model_copy(update={"train_embeddings": True}) if with_embeddings else run.recipe
        terms = _terms_of(self._items, recipe.packing, terms_for(self._shape, recipe, run.method, place.device))
        terms = replace(terms, process_bytes=place.process_bytes, is_fast=terms.is_fast if is_fast is None else is_fast)
        key = shape_key(self._shape, recipe, run.method, terms)
        made = plan(
            self._shape,
            recipe,
            run.method,
            place.free_bytes if run.memory_gb is None else min(place.free_bytes, int(run.memory_gb * GB)),
            max(_tokens_alone(item, recipe.packing) for item in self._items),
            largest_step=self._largest_step,
            terms=replace(terms, correction=self._spec.memory_corrections.get(key, 1.0)),
            divisor=self._spec.micro_batch_divisor,
        )
        if made.refusal is not None:
            raise ConfigError(made.refusal)
        return made

    def replanned(self, made: MemoryPlan, *, is_fast: bool, with_embeddings: bool) -> MemoryPlan | None:
        """Another plan, where it turned out that another way computes, or that embeddings are trained; else None.

        The whole team asks together, and takes the slow way's plan if any of them does.
        """
        recipe = self._spec.run.recipe
        more = with_embeddings and recipe.tuning == "lora" and recipe.train_embeddings is not True
        every = self._team.gathered(is_fast)
        if all(every) == made.is_fast and not more:
            return None
        return self.plan(is_fast=all(every), with_embeddings=more)


def told(made: MemoryPlan) -> str:
    """The plan in one line."""
    return (
        f"memory: {size_text(made.forecast.total)} foretold of {size_text(made.limit_bytes)}, "
        f"passes of up to {made.pack_tokens} tokens, "
        f"{made.checkpointed_layers} of {made.num_layers} layers computed again; {made.reason}"
    )


def with_memory(result: Result, made: MemoryPlan, log: Callable[[str], None]) -> Result:
    """The result with what was foretold and what was really taken, for the runs to come."""
    measured = peak_bytes()
    log(f"memory: {size_text(measured)} at the peak, {size_text(made.forecast.total)} were foretold")
    figures: dict[str, Any] = asdict(made) | {
        "measured_bytes": measured,
        "ratio": measured_ratio(made.forecast, made.correction, measured),
    }
    return result.model_copy(update={"detail": result.detail | {"memory": figures}})


def peak_bytes() -> int:
    """The most this process ever held on its device."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(team: Team) -> Place:
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        together = math.ceil(team.size / torch.cuda.device_count())
        held = int(torch.cuda.memory_allocated())
        return Place("cuda", (free + torch.cuda.memory_reserved()) // together, held)
    return Place("cpu", usable_ram() // team.size, _status_bytes("VmRSS"))


def _agreed(places: Sequence[Place]) -> Place:
    return Place(
        places[0].device, min(place.free_bytes for place in places), max(place.process_bytes for place in places)
    )


def _status_bytes(name: str) -> int:
    """A line of this process's /proc status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _terms_of(items: Sequence[Item], is_packing: bool, terms: Terms) -> Terms:
    """The terms with what only the data can say."""
    wanted = sum(item.num_trained + (item.num_context if item.counts_context else 0) for item in items)
    num_tokens = sum(_tokens_alone(item, is_packing) for item in items)
    shares = is_packing and any(item.prompt and len(item.completions) > 1 for item in items)
    return replace(terms, wanted_share=min(1.0, wanted / num_tokens), shares_prompts=shares)


def _tokens_alone(item: Item, is_packing: bool) -> int:
    """Tokens of a pass with nothing else in it, padding included."""
    return len(item) if is_packing else len(item.completions) * item.longest
