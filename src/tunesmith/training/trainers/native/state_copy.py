"""A copy of everything a checkpoint holds, taken between two steps: it can be written while training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.files import canonical_json
from tunesmith.models.adapters import write_tensors
from tunesmith.models.tuned import settings_of, tensors_of, weights_name
from tunesmith.training.trainers.native.state import ADAPTER, STATE, TENSORS, SavedState


@dataclass(frozen=True)
class StateCopy:
    """Nothing in it is shared with the model or the optimizer, whose next step changes them in place."""

    state: SavedState
    weights: dict[str, Any]
    weights_name: str
    settings: tuple[str, str]
    """Name and content of the file that says what the weights are."""
    tensors: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Into a staging folder; whoever publishes it makes it durable."""
        (folder / ADAPTER).mkdir()
        write_tensors(folder / ADAPTER / self.weights_name, self.weights)
        name, content = self.settings
        (folder / ADAPTER / name).write_text(content)
        (folder / STATE).write_text(canonical_json(self.state.model_dump(mode="json")))
        write_tensors(folder / TENSORS, self.tensors)


def copy_state(state: SavedState, model: Any, memory: dict[str, Any], base: Path) -> StateCopy:
    """The one part of a save that training waits for."""
    return StateCopy(
        state=state,
        weights=tensors_of(model),
        weights_name=weights_name(model),
        settings=settings_of(model, base),
        tensors={name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in memory.items()},
    )
