"""A copy of everything a checkpoint holds, taken between two steps: it can be written while training goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict

from tunesmith.files import canonical_json
from tunesmith.modeling.adapters import CONFIG, WEIGHTS
from tunesmith.modeling.tensor_files import write_tensors
from tunesmith.trainers.native.state import ADAPTER, STATE, TENSORS, SavedState


@dataclass(frozen=True)
class StateCopy:
    """Nothing in it is shared with the model or the optimizer, whose next step changes them in place."""

    state: SavedState
    adapter: dict[str, Any]
    adapter_config: str
    tensors: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Into a staging folder; whoever publishes it makes it durable."""
        (folder / ADAPTER).mkdir()
        write_tensors(folder / ADAPTER / WEIGHTS, self.adapter)
        (folder / ADAPTER / CONFIG).write_text(self.adapter_config)
        (folder / STATE).write_text(canonical_json(self.state.model_dump(mode="json")))
        write_tensors(folder / TENSORS, self.tensors)


def copy_state(state: SavedState, adapted: Any, memory: dict[str, Any], base_name: str) -> StateCopy:
    """The one part of a save that training waits for."""
    return StateCopy(
        state=state,
        adapter=adapter_tensors(adapted),
        adapter_config=_config_text(adapted, base_name),
        tensors={name: _own(tensor) for name, tensor in memory.items()},
    )


def adapter_tensors(adapted: Any) -> dict[str, Any]:
    """The adapter's weights under the names of its file, in memory of their own."""
    weights = get_peft_model_state_dict(adapted, adapter_name=adapted.active_adapter, save_embedding_layers=False)
    return {name: _own(tensor) for name, tensor in weights.items()}


def _own(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _config_text(adapted: Any, base_name: str) -> str:
    """As `save_adapter` writes it; a set has another order in every process, a sorted list does not."""
    settings = {
        key: sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", value)
        for key, value in adapted.peft_config[adapted.active_adapter].to_dict().items()
    }
    settings |= {"base_model_name_or_path": base_name, "inference_mode": True}
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"
