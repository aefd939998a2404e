"""The memory plan of a training that is about to load its base: asked of the device, told, held against the peak."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tunesmith.domain.memory_forecast import GB, Terms, measured_ratio, shape_key, size_text, terms_for
from tunesmith.domain.memory_plan import MemoryPlan, plan
from tunesmith.domain.program import Result
from tunesmith.domain.spec import TrainSpec
from tunesmith.errors import ConfigError
from tunesmith.modeling.architecture import read_shape
from tunesmith.modeling.packs import Item
from tunesmith.programs.machine_memory import usable_ram
from tunesmith.trainers.native.order import Order
from tunesmith.trainers.native.team import Team

_STEPS_LOOKED_AT = 200
"""The largest of so many steps stands for all: a step that is larger makes one more pass, and needs no more memory."""


@dataclass(frozen=True)
class Place:
    """What one process may use, and what it uses already."""

    device: Literal["cuda", "cpu"]
    free_bytes: int
    process_bytes: int


def plan_memory(spec: TrainSpec, items: Sequence[Item], order: Order, team: Team) -> MemoryPlan:
    """Before any weight is loaded; raises what cannot fit, with the numbers and what to change.

    Every process of a team comes to the same plan: that of the one with the least room.
    """
    run, recipe = spec.run, spec.run.recipe
    shape = read_shape(Path(run.base.path))
    place = _agreed(team.gathered(_place(team)))
    terms = _terms_of(items, recipe.packing, terms_for(shape, recipe, run.method, place.device))
    terms = replace(terms, process_bytes=place.process_bytes)
    terms = replace(terms, correction=spec.memory_corrections.get(shape_key(shape, recipe, run.method, terms), 1.0))
    limit = place.free_bytes if run.memory_gb is None else min(place.free_bytes, int(run.memory_gb * GB))
    steps = range(min(order.num_steps, _STEPS_LOOKED_AT))
    made = plan(
        shape,
        recipe,
        run.method,
        limit,
        max(_tokens_alone(item, recipe.packing) for item in items),
        largest_step=math.ceil(max(order.num_tokens(step) for step in steps) / team.size),
        terms=terms,
        divisor=spec.micro_batch_divisor,
    )
    if made.refusal is not None:
        raise ConfigError(made.refusal)
    return made


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
        return Place("cuda", (free + torch.cuda.memory_reserved()) // together, int(torch.cuda.memory_allocated()))
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
    shares = is_packing and any(item.prompt and len(item.branches) > 1 for item in items)
    return replace(terms, wanted_share=min(1.0, wanted / num_tokens), shares_prompts=shares)


def _tokens_alone(item: Item, is_packing: bool) -> int:
    """Tokens of a pass with nothing else in it, padding included."""
    return len(item) if is_packing else len(item.branches) * item.longest
