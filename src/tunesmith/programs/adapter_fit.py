"""Whether an adapter's tensors fit its own settings, the recipe and the base: names, ranks, shapes, size. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.profiles.architecture import read_tensor_shapes
from tunesmith.profiles.profile import Recipe
from tunesmith.programs.adapter_config import rank_of
from tunesmith.programs.weights import Tensor

_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B)(\.weight)?\Z")
_VECTOR = re.compile(r"(?P<module>.+)\.(lora_magnitude_vector(\.weight)?|lora_B\.bias)\Z")
_SLACK = 16 << 20  # headers, tokenizer, notes
_WIDEST = 8  # bytes of a number

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """The base that an adapter is for, by the shapes of its tensors; and the recipe that it was to be trained by."""

    shapes: Mapping[str, Shape]
    recipe: Recipe

    @classmethod
    def of(cls, folder: Path, recipe: Recipe) -> Base:
        return cls(read_tensor_shapes(folder), recipe)

    def most_bytes(self, kind: str) -> int:
        """What an adapter of this recipe, or a fully tuned model, can take at most."""
        whole = sum(math.prod(shape) for shape in self.shapes.values())
        if kind == "model":
            return _WIDEST * 2 * whole + _SLACK  # a tied matrix may stand there twice
        matrices = [shape for shape in self.shapes.values() if len(shape) == 2]
        low_rank = sum(self.recipe.lora_rank * sum(shape) + max(shape) for shape in matrices)
        largest = max((math.prod(shape) for shape in matrices), default=0)
        return _WIDEST * (low_rank + 2 * largest) + _SLACK

    def shapes_of(self, modules: Sequence[str]) -> set[Shape]:
        """Shapes of the matrices that these settings name."""
        return {shape for name, shape in self.shapes.items() if _is_named(name.rpartition(".")[0], modules)}

    def candidates(self, module: str) -> list[Shape]:
        """Shapes of the matrix with this name; where a library renames modules, of those with the same last name."""
        exact = self.shapes.get(f"{module}.weight")
        if exact is not None:
            return [exact]
        last = f".{module.rpartition('.')[2]}.weight"
        return [shape for name, shape in self.shapes.items() if f".{name}".endswith(last)]


def misfit(tensors: Sequence[Tensor], settings: Mapping[str, Any], base: Base | None) -> str | None:
    """Why these tensors are not an adapter with these settings, for this base where one is given; None if they are."""
    if base is not None and int(settings["r"]) > base.recipe.lora_rank:
        return f"its rank {settings['r']} is more than the recipe's lora_rank, {base.recipe.lora_rank}"
    saved = tuple(settings.get("modules_to_save") or ())
    try:
        for tensor in tensors:
            _check(tensor, settings, saved, base)
    except DataError as error:
        return error.message
    return None


def _check(tensor: Tensor, settings: Mapping[str, Any], saved: tuple[str, ...], base: Base | None) -> None:
    name, shown = tensor.name.removeprefix(_PREFIX), repr(tensor.name[:80])
    if name == tensor.name:
        raise DataError(f"{shown} does not begin with {_PREFIX}")
    if (lora := _LORA.match(name)) is not None:
        _check_pair(tensor, lora["module"], lora["part"], settings, base)
    elif (vector := _VECTOR.match(name)) is not None:
        sizes = {size for shape in (base.candidates(vector["module"]) if base else ()) for size in shape}
        if base is not None and math.prod(tensor.shape) not in sizes:
            raise DataError(f"{shown} does not fit a module of the base")
    else:
        _check_saved(tensor, name, saved, base, is_tied=settings.get("ensure_weight_tying") is True)


def _check_pair(tensor: Tensor, module: str, part: str, settings: Mapping[str, Any], base: Base | None) -> None:
    shown, is_down = repr(tensor.name[:80]), part.endswith("A")
    if len(tensor.shape) != 2:
        raise DataError(f"{shown} is not a matrix")
    rank, other = tensor.shape if is_down else (tensor.shape[1], tensor.shape[0])
    if rank != rank_of(settings, module):
        raise DataError(f"{shown} has rank {rank}, its settings say {rank_of(settings, module)}")
    if base is not None and not any(len(shape) == 2 and other in shape for shape in base.candidates(module)):
        raise DataError(f"{shown} of shape {list(tensor.shape)} does not fit a module of the base")


def _check_saved(tensor: Tensor, name: str, saved: tuple[str, ...], base: Base | None, *, is_tied: bool) -> None:
    """A module trained as a whole: named in the settings or tied to one that is, of the shape that the base has."""
    shown, module = repr(tensor.name[:80]), name.rpartition(".")[0]
    if is_tied and saved and (base is None or tensor.shape in base.shapes_of(saved)):
        return  # the head of a base with tied embeddings: peft writes it beside them and names only them
    if not _is_named(module, saved):
        raise DataError(f"{shown} is neither a low-rank pair nor a module that modules_to_save names")
    if base is None:
        return
    exact = base.shapes.get(name)
    fits = tensor.shape == exact if exact is not None else tensor.shape in set(base.shapes.values())
    if not fits:
        raise DataError(f"{shown} of shape {list(tensor.shape)} does not fit a module of the base")


def _is_named(module: str, names: Sequence[str]) -> bool:
    """Whether one of the names is the module's, or the end of it at a dot."""
    return any(f".{module}".endswith(f".{one}") for one in names)
