"""An adapter's weights by module of the base, for serving: so one batch can mix adapters.

peft decides what belongs where: it puts the adapter on a copy of the base without weights, once per kind of adapter,
and what it did there is the plan by which files are read. Nothing here touches the model that answers.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper

from tunesmith.core.errors import DataError
from tunesmith.models.adapters import detach, read_config, read_weights

_PREFIX = "base_model.model."
_NAME = "default"


class Part(Protocol):
    """What an adapter does at one module. `output` is the base's for the same input, and may be changed in place."""

    replaces: bool
    """It does not need the base's output."""

    def __call__(self, given: Any, output: Any) -> Any: ...


class LowRank:
    """A low-rank change beside a matrix: output + scaling · up(down(given)); DoRA also sets each output's size."""

    replaces = False

    def __init__(self, down: Any, up: Any, bias: Any, size: Any, base_bias: Any) -> None:
        self.down, self.up, self.bias, self.size, self.base_bias = down, up, bias, size, base_bias

    def __call__(self, given: Any, output: Any) -> Any:
        change = torch.nn.functional.linear(
            torch.nn.functional.linear(given.to(self.down.dtype), self.down), self.up, self.bias
        )
        if self.size is None:
            return output + change
        bare = output if self.base_bias is None else output - self.base_bias
        return output + (self.size - 1) * bare + self.size * change


class LowRankEmbedding:
    """The same beside an embedding: the low-rank rows of the given tokens."""

    replaces = False

    def __init__(self, down: Any, up: Any, size: Any) -> None:
        self.down, self.up, self.size = down, up, size

    def __call__(self, given: Any, output: Any) -> Any:
        change = torch.nn.functional.linear(torch.nn.functional.embedding(given, self.down), self.up)
        return output + change if self.size is None else self.size * (output + change)


class ReplacedModule:
    """A fully trained module (PEFT: modules_to_save), used instead of the base's."""

    replaces = True

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, given: Any, output: Any) -> Any:
        return self.module(given)


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter's parts by the name of the base's module, and their total size."""

    parts: Mapping[str, Part]
    num_bytes: int

    @property
    def has_sequence_dim(self) -> bool:
        """Whether every module gets inputs with one row per sequence; experts get only the tokens routed to them."""
        return not any(".experts." in name for name in self.parts)


Maker = Callable[[Mapping[str, Any], Any], Part]


@dataclass(frozen=True)
class _Plan:
    shapes: dict[str, tuple[int, ...]]
    makers: dict[str, Maker]


class AdapterReader:
    """Reads adapters for one base, which may be answering meanwhile."""

    def __init__(self, model: Any) -> None:
        self._model = model
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._plans: dict[str, _Plan] = {}
        self._skeleton: Any = None

    def read(self, folder: Path) -> AdapterWeights:
        """Raises DataError where the folder is no adapter for this base, or one that cannot be served."""
        settings = read_config(folder)
        if settings.get("bias", "none") != "none":
            raise DataError(
                f"adapter {folder.name}: it changes the base's own biases ({settings['bias']!r}), which other adapters "
                "share; train without bias"
            )
        key = json.dumps(settings, sort_keys=True)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(folder, settings)
        with torch.inference_mode(False), torch.no_grad():
            weights = self._to_device(read_weights(folder, plan.shapes))
            parts = {name: make(weights, self._model.get_submodule(name)) for name, make in plan.makers.items()}
        held = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in weights.values()}
        return AdapterWeights(parts, sum(held.values()))

    def _to_device(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the weights to the device in the base's dtype; a tied embedding that was saved twice is copied once."""
        on_device: dict[str, Any] = {}
        large: list[Any] = []
        for name, tensor in weights.items():
            same = next((one for one in large if one.shape == tensor.shape and torch.equal(one, tensor)), None)
            if same is None:
                is_large = tensor.ndim == 2 and "lora_" not in name
                large += [tensor] if is_large else []
                on_device[name] = tensor.to(self._device, self._dtype)
            else:
                on_device[name] = on_device[next(key for key, one in weights.items() if one is same)]
        return on_device

    def _plan(self, folder: Path, settings: dict[str, Any]) -> _Plan:
        if self._skeleton is None:
            with torch.device("meta"):
                self._skeleton = transformers.AutoModelForCausalLM.from_config(self._model.config)
        config = LoraConfig(task_type="CAUSAL_LM", **{**settings, "lora_dropout": 0.0})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about merging and shards, which nobody does here
                adapted = get_peft_model(self._skeleton, config, adapter_name=_NAME, low_cpu_mem_usage=True)
                state = get_peft_model_state_dict(adapted, adapter_name=_NAME, save_embedding_layers=False)
        except (ValueError, TypeError, KeyError) as error:
            self._skeleton = None
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"adapter {folder.name}: it does not belong to this base model ({reason})") from None
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        makers = {
            name.removeprefix(_PREFIX): maker
            for name, module in adapted.named_modules()
            if (maker := _maker(folder, name, module)) is not None
        }
        self._skeleton = detach(adapted)
        return _Plan(shapes, makers)


def _maker(folder: Path, name: str, module: Any) -> Maker | None:
    """How this module's part is made of the file's weights; None where the adapter does nothing there."""
    if isinstance(module, ModulesToSaveWrapper):
        names = [part for part, _ in module.modules_to_save[_NAME].named_parameters()]
        return lambda weights, live: ReplacedModule(
            _with_weights(live, {part: weights[f"{name}.{part}"] for part in names})
        )
    if _NAME in getattr(module, "lora_embedding_A", ()):
        return _embedding_maker(name, module.scaling[_NAME])
    if _NAME in getattr(module, "lora_A", ()):
        if module.lora_A[_NAME].weight.ndim != 2:
            raise DataError(f"adapter {folder.name}: {name} is a convolution, which is not served; leave it out")
        return _matrix_maker(name, module.scaling[_NAME], bool(getattr(module, "fan_in_fan_out", False)))
    return None


def _matrix_maker(name: str, scaling: float, is_transposed: bool) -> Maker:
    def make(weights: Mapping[str, Any], live: Any) -> Part:
        down, up = weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"]
        bias = weights.get(f"{name}.lora_B.bias")
        size = weights.get(f"{name}.lora_magnitude_vector")
        if size is not None:
            base = live.weight.T if is_transposed else live.weight
            size = _factor(size, base, scaling * (up.float() @ down.float()))
        return LowRank(down, up * scaling, None if bias is None else bias * scaling, size, getattr(live, "bias", None))

    return make


def _embedding_maker(name: str, scaling: float) -> Maker:
    def make(weights: Mapping[str, Any], live: Any) -> Part:
        down, up = weights[f"{name}.lora_embedding_A"], weights[f"{name}.lora_embedding_B"]
        size = weights.get(f"{name}.lora_magnitude_vector")
        if size is not None:
            size = _factor(size, live.weight.T, scaling * (up.float() @ down.float()))
        factor = scaling * _embed_scale(live)
        return LowRankEmbedding(down.T.contiguous(), up * factor, size)

    return make


def _factor(size: Any, base: Any, change: Any) -> Any:
    """By what DoRA multiplies each output: its learned size over that of the changed matrix; fixed once trained."""
    return (size.float() / (base.float() + change).norm(dim=1)).to(size.dtype)


def _embed_scale(live: Any) -> float:
    """Some embeddings multiply what they look up; the change is multiplied alike."""
    scale = getattr(live, "embed_scale", None)
    return 1.0 if scale is None else float(scale)


def _with_weights(live: Any, weights: Mapping[str, Any]) -> Any:
    """A module like the base's with other weights; the base's are not copied."""
    memo: dict[int, Any] = {
        id(tensor): torch.nn.Parameter(weights[name], requires_grad=False) for name, tensor in live.named_parameters()
    }
    for module in live.modules():
        if "forward" in module.__dict__:  # where adapters come in: not part of the module itself
            memo[id(module.__dict__["forward"])] = torch.nn.Module.forward
    made = copy.deepcopy(live, memo)
    for module in made.modules():
        module.__dict__.pop("forward", None)
    return made
