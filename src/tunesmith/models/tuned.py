"""What training changes, whichever it is: an adapter on a frozen base, or every weight of a model (`recipe.tuning`).

An adapter is saved in PEFT's format, a whole model as a Hugging Face folder of its own; both as safetensors and text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tunesmith.core.errors import DataError
from tunesmith.models import adapters
from tunesmith.profiles.base_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_CONFIG, MODEL_WEIGHTS


def whole(base: Any) -> Any:
    """The base with every weight to be trained, in fp32: an optimizer needs more digits than bf16 has."""
    return base.float().requires_grad_(True)


def is_whole(model: Any) -> bool:
    return not hasattr(model, "peft_config")


def tensors_of(model: Any) -> dict[str, Any]:
    """What is trained, under the names of its file, in memory of its own; a tied weight comes once."""
    if not is_whole(model):
        return adapters.tensors_of(model)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.named_parameters()}


def put_weights(model: Any, folder: Path) -> None:
    """Replace what is trained by the weights of a folder; all of them, and nothing else."""
    if not is_whole(model):
        adapters.put_weights(model, folder)
        return
    try:
        weights = load_file(folder / MODEL_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DataError(f"model {folder.name}: {MODEL_WEIGHTS} cannot be read ({error})") from None
    expected = dict(model.named_parameters())
    for name in sorted(weights.keys() ^ expected.keys()):
        raise DataError(f"model {folder.name}: it does not belong to this base model ({name} does not match)")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape or not bool(torch.isfinite(tensor).all()):
            raise DataError(f"model {folder.name}: {name} has another shape than in the base, or holds NaN")
        expected[name].data.copy_(tensor)


def settings_of(model: Any, base: Path) -> tuple[str, str]:
    """Name and content of the file that says what the weights are."""
    if is_whole(model):
        return MODEL_CONFIG, (base / MODEL_CONFIG).read_text()
    return ADAPTER_CONFIG, adapters.settings_text(model, base.name)


def weights_name(model: Any) -> str:
    return MODEL_WEIGHTS if is_whole(model) else ADAPTER_WEIGHTS
