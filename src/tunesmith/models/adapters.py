"""LoRA adapters in PEFT's format: made, checked before they are loaded, saved with the same bytes every time."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tunesmith.core.errors import ConfigError, DataError
from tunesmith.models.quantized import dense_weight
from tunesmith.profiles.base_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunesmith.profiles.profile import Recipe
from tunesmith.programs.adapter_config import read_settings

_NAME = "default"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


def new_adapter(model: Any, recipe: Recipe, *, train_embeddings: bool | None = None) -> Any:
    """The base with a fresh LoRA adapter on it, ready to train; torch's random state decides its initial weights.

    `train_embeddings` is what `auto` was resolved to; without it only an explicit `true` of the recipe trains them.
    """
    with_embeddings = recipe.train_embeddings is True if train_embeddings is None else train_embeddings
    return _attach(model, _config_of(model, recipe, with_embeddings), trainable=True)


def load_adapter(model: Any, folder: Path, *, trainable: bool = False, dropout: float = 0.0) -> Any:
    """The base with the adapter of a folder on it. The folder is checked first: nothing in it is ever executed."""
    settings = read_config(folder)
    adapted = _attach(model, LoraConfig(task_type="CAUSAL_LM", **{**settings, "lora_dropout": dropout}), trainable)
    put_weights(adapted, folder)
    return adapted


def detach(adapted: Any) -> Any:
    """The bare base again, as it was before; peft's own `unload` would keep trained embeddings in it."""
    model = adapted.get_base_model()
    for name, module in list(model.named_modules()):
        original = getattr(module, "original_module", None)
        if original is None and hasattr(module, "lora_A"):
            original = module.base_layer
        if original is not None:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, original)
    del model.peft_config
    return model


def put_weights(adapted: Any, folder: Path) -> None:
    """Replace the adapter's weights by those of a folder; all of them, and nothing else."""
    shapes = {name: tuple(tensor.shape) for name, tensor in _state(adapted).items()}
    set_peft_model_state_dict(adapted, read_weights(folder, shapes), adapter_name=_NAME)


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The weights in a folder, which must be exactly those named, of these shapes, and finite."""
    _refuse_pickles(folder)
    try:
        weights: dict[str, Any] = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DataError(f"adapter {folder.name}: {ADAPTER_WEIGHTS} cannot be read ({error})") from None
    bad = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise DataError(f"adapter {folder.name}: {bad[0]} holds NaN or infinity; it must not be used")
    if set(weights) != set(shapes):
        odd = sorted(set(weights) ^ set(shapes))
        raise DataError(f"adapter {folder.name}: it does not belong to this base model ({odd[0]} does not match)")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != shapes[name]:
            raise DataError(
                f"adapter {folder.name}: {name} has shape {tuple(tensor.shape)}, this base model needs {shapes[name]}"
            )
    return weights


def save_adapter(adapted: Any, folder: Path, base_name: str) -> None:
    """Write the adapter so that peft, vLLM and others can load it; the same weights always give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / ADAPTER_WEIGHTS, tensors_of(adapted))
    (folder / ADAPTER_CONFIG).write_text(settings_text(adapted, base_name))


def tensors_of(adapted: Any) -> dict[str, Any]:
    """The adapter's weights under the names of its file, in memory of their own."""
    return {name: _own(tensor) for name, tensor in _state(adapted).items()}


def settings_text(adapted: Any, base_name: str) -> str:
    """The content of adapter_config.json."""
    settings = {key: _plain(value) for key, value in adapted.peft_config[_NAME].to_dict().items()}
    settings |= {"base_model_name_or_path": base_name, "inference_mode": True}
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a LoRA adapter; anything else, and any feature that could run code, is refused by name."""
    _refuse_pickles(folder)
    try:
        return read_settings(folder)
    except DataError as error:
        raise DataError(f"adapter {folder.name}: {error.message}") from None


def trained_parameters(adapted: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors of what an optimizer may change; a tied weight comes once."""
    return ((name, tensor) for name, tensor in adapted.named_parameters() if tensor.requires_grad)


def num_nonfinite(adapted: Any) -> int:
    """How many of the adapter's tensors hold NaN or infinity."""
    return sum(1 for _, tensor in trained_parameters(adapted) if not bool(torch.isfinite(tensor).all()))


def adapter_norms(adapted: Any) -> dict[str, float]:
    """By module, how far the adapter moves its weights: the Frobenius norm of the change."""
    norms: dict[str, float] = {}
    for name, module in adapted.named_modules():
        if _NAME not in getattr(module, "lora_A", {}):
            continue
        down = module.lora_A[_NAME].weight.detach().float()
        up = module.lora_B[_NAME].weight.detach().float()
        if _NAME in module.lora_magnitude_vector:
            norm = _dora_norm(module, up, down)
        else:
            # ‖BA‖² = trace(BᵀB · AAᵀ): products of rank × rank, never the full matrix
            squared = float(((up.T @ up) * (down @ down.T)).sum())
            norm = module.scaling[_NAME] * math.sqrt(max(0.0, squared))
        norms[name.removeprefix("base_model.model.")] = norm
    return norms


def _dora_norm(module: Any, up: Any, down: Any) -> float:
    """Of size · (W + scale · BA) / ‖W + scale · BA‖ - W, row by row: here the full matrix cannot be avoided."""
    weight = dense_weight(module.base_layer).float()
    moved = weight + module.scaling[_NAME] * (up @ down)
    size = module.lora_magnitude_vector[_NAME].weight.detach().float()
    return float(((size / moved.norm(dim=1)).unsqueeze(1) * moved - weight).norm())


def adapted_modules(model: Any, target_modules: tuple[str, ...] | str) -> frozenset[str]:
    """Full names of the base's modules that get an adapter; a name that matches none, or no matrix, is refused."""
    head = model.get_output_embeddings()
    names = dict(model.named_modules())
    linear = {name for name, module in names.items() if isinstance(module, torch.nn.Linear) and module is not head}
    if target_modules == "all-linear":
        return frozenset(linear)
    found: set[str] = set()
    for target in target_modules:
        matching = _matching(names, target)
        odd = [name for name in sorted(matching) if getattr(getattr(names[name], "weight", None), "ndim", 0) != 2]
        if not matching or odd:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            problem = f"{odd[0]!r} has no matrix" if odd else f"the base model has no module {target!r}"
            raise ConfigError(f"recipe.target_modules: {problem}; its linear modules are {known}")
        found |= matching
    return frozenset(found)


def start_differences(recipe: Recipe, config: Mapping[str, Any], base: Any) -> list[str]:
    """Every field in which the adapter that a run starts from (`read_config`) is not what the recipe would make.

    Training goes on in the adapter's own shape, so each difference would silently be ignored. `auto` embeddings take
    what the adapter has.
    """
    saved = bool(config.get("modules_to_save"))
    pairs: list[tuple[str, object, object]] = [
        ("lora_rank", recipe.lora_rank, config.get("r")),
        ("lora_alpha", recipe.lora_alpha, config.get("lora_alpha")),
        ("rslora", recipe.rslora, bool(config.get("use_rslora"))),
        ("dora", recipe.dora, bool(config.get("use_dora"))),
        ("train_embeddings", saved if recipe.train_embeddings == "auto" else recipe.train_embeddings, saved),
    ]
    lines = [
        f"recipe.{name} is {ours}, but the adapter that the run starts from has {theirs}; set it to that, or start "
        "from the base"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    theirs = config.get("target_modules")
    names = dict(base.named_modules())
    if theirs == "all-linear":
        trained = adapted_modules(base, "all-linear")
    else:
        parts = theirs if isinstance(theirs, list | tuple) else ()  # a pattern: no recipe can say the same
        trained = frozenset().union(*(_matching(names, str(part)) for part in parts))
    if trained != adapted_modules(base, recipe.target_modules):
        shown = f"a list: {', '.join(map(str, theirs))}" if isinstance(theirs, list | tuple) else theirs
        lines.append(
            f"recipe.target_modules is {_shown_modules(recipe)}, but the adapter that the run starts from has {shown}; "
            "set it to that, or start from the base"
        )
    lines += [
        f"the adapter that the run starts from has {key} {config[key]!r}, which no recipe can train on; start from the "
        "base"
        for key in _BEYOND_RECIPES
        if config.get(key) not in (None, False, "none", {}, [])
    ]
    return lines


_BEYOND_RECIPES = (
    "bias",
    "lora_bias",
    "exclude_modules",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
)


def _shown_modules(recipe: Recipe) -> str:
    wanted = recipe.target_modules
    return wanted if isinstance(wanted, str) else ", ".join(wanted)


def _matching(names: Mapping[str, Any], target: str) -> set[str]:
    """As peft matches: the whole name, or its end behind a dot."""
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _config_of(model: Any, recipe: Recipe, with_embeddings: bool) -> Any:
    modules = adapted_modules(model, recipe.target_modules)
    if recipe.target_modules == "all-linear":
        wanted = sorted({name.rpartition(".")[2] for name in modules})
    else:
        wanted = sorted(recipe.target_modules)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=wanted,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        modules_to_save=_embedding_names(model, recipe) if with_embeddings else None,
        ensure_weight_tying=with_embeddings and _is_tied(model),
    )


def _embedding_names(model: Any, recipe: Recipe) -> list[str]:
    """Input and output where they are one matrix or the recipe says true; else the output alone (see the recipe)."""
    modules = [model.get_output_embeddings()]
    if recipe.train_embeddings is True or _is_tied(model):
        modules.append(model.get_input_embeddings())
    return [name.rpartition(".")[2] for name, found in model.named_modules() if any(found is one for one in modules)]


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _attach(model: Any, config: Any, trainable: bool) -> Any:
    adapted = get_peft_model(model, config, adapter_name=_NAME)
    for name, tensor in adapted.named_parameters():
        ours = "lora_" in name or ".modules_to_save." in name
        tensor.requires_grad_(ours and trainable)
        if ours and tensor.dtype != torch.float32:
            tensor.data = tensor.data.float()  # an optimizer needs more digits than bf16 has
    return adapted


def _state(adapted: Any) -> dict[str, Any]:
    return dict(get_peft_model_state_dict(adapted, adapter_name=_NAME, save_embedding_layers=False))


def _own(tensor: Any) -> Any:
    """A copy in memory of its own: safetensors refuses two names for one memory, which tied embeddings are."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _plain(value: Any) -> Any:
    """A set has another order in every process; a list does not."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)


def _refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix.lower() in _PICKLES:
            raise DataError(
                f"adapter {folder.name}: refused because of {path.name}: pickled weights can run code; "
                "save the adapter as safetensors"
            )


_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write the tensors; the library wraps the system's error into one of its own, which is unwrapped here."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None
