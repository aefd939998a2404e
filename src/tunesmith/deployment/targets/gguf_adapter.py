"""A LoRA adapter as GGUF, for llama.cpp and Ollama: the pairs of A and B under the names of the base's GGUF.

In files of the Llama family the rows of the query and key projections stand in another order than in Hugging Face's
(pairs of the rotation side by side); the rows of B move with them. Everything else keeps its place, alpha its value.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError, MissingExtra, quoted
from tunesmith.deployment.targets.adapter_files import read_config
from tunesmith.profiles.base_model import ADAPTER_WEIGHTS
from tunesmith.programs.weights import Tensor, read_header

ROTATED = frozenset({"llama"})
"""Architectures (Mistral's and SmolLM2's files are `llama` too) whose query and key rows are reordered."""
KNOWN = ROTATED | {"qwen2", "qwen3", "gemma", "gemma2", "gemma3"}
_PREFIX = "base_model.model."
_QUERY, _KEY = ".self_attn.q_proj", ".self_attn.k_proj"
_MAX_TENSORS = 100_000


@dataclass(frozen=True)
class GgufBase:
    """What an adapter must know of the base it is made for."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    file_type: str | None = None
    """In what its weights are held, e.g. q4_1; None where nobody said."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Of its tensors, as GGUF counts: columns first; None where nobody told."""

    @property
    def is_quantized(self) -> bool:
        return self.file_type is not None and self.file_type not in ("f32", "f16", "bf16")


def read_base(path: Path) -> GgufBase:
    """What the base's own file says; its weights are not read. Raises DataError."""
    _need_gguf()
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        shapes = {tensor.name: tuple(int(size) for size in tensor.shape) for tensor in reader.tensors[:_MAX_TENSORS]}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        problem = f"{path}: not a readable GGUF file ({type(error).__name__}); name the base in options.model"
        raise DataError(problem) from None
    try:
        kind = gguf.LlamaFileType(int(fields["general.file_type"])).name.lower()
    except (KeyError, ValueError, TypeError):
        kind = ""
    held = kind.removeprefix("mostly_").removeprefix("all_") or None
    return base_of(fields, file_type=held, shapes=shapes)


def base_of(
    fields: Mapping[str, Any], *, file_type: str | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> GgufBase:
    """The base by the keys of its metadata, as a file or Ollama tells them."""
    architecture = fields.get("general.architecture")
    try:
        num_heads = int(fields[f"{architecture}.attention.head_count"])
        num_kv_heads = int(fields.get(f"{architecture}.attention.head_count_kv") or num_heads)
        num_layers = int(fields[f"{architecture}.block_count"])
    except (KeyError, ValueError, TypeError):
        raise DataError("the base does not tell its architecture, layers and heads") from None
    if architecture not in KNOWN:
        raise DataError(
            f"adapters of the architecture {quoted(str(architecture))} cannot be converted to GGUF yet; "
            f"known: {', '.join(sorted(KNOWN))}"
        )
    return GgufBase(str(architecture), num_layers, num_heads, num_kv_heads, file_type, shapes)


def convert(folder: Path, base: GgufBase, target: Path) -> None:
    """Write the adapter of `folder` as `target`, whole or not at all; raises DataError where it cannot be one."""
    _need_gguf()
    import gguf

    config = read_config(folder)
    alpha = config.get("lora_alpha")
    if config.get("alpha_pattern"):
        raise DataError(f"{folder.name}: GGUF holds one alpha, and alpha_pattern gives several")
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise DataError(f"{folder.name}: lora_alpha {quoted(str(alpha))} is no positive number")
    tensors = list(_tensors(folder, base))
    _check_shapes(tensors, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(staged, base.architecture)
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
        for name, values in tensors:
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with staged.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)


def rotated_rows(values: Any, num_heads: int) -> Any:
    """Rows of a query or key projection in the order of Llama's GGUF files."""
    rows = values.shape[0]
    halves = values.reshape(num_heads, 2, rows // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _tensors(folder: Path, base: GgufBase) -> Iterator[tuple[str, Any]]:
    """Name and values of each matrix, in the file's own precision (bf16 as f32)."""
    import gguf

    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == base.architecture), base.num_layers
    )
    path = folder / ADAPTER_WEIGHTS
    with path.open("rb") as source:
        for tensor in read_header(path):
            module, half = _split(folder, tensor.name)
            name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
            if name is None:
                raise DataError(f"{folder.name}: {quoted(module)} has no name in GGUF for {base.architecture}")
            source.seek(tensor.begin)
            values = _values(folder, tensor, source.read(tensor.end - tensor.begin))
            if half == "lora_b" and base.architecture in ROTATED and module.endswith((_QUERY, _KEY)):
                values = rotated_rows(values, base.num_heads if module.endswith(_QUERY) else base.num_kv_heads)
            yield f"{name}.{half}", values


def _split(folder: Path, name: str) -> tuple[str, str]:
    """The module that a matrix belongs to, and which half it is."""
    for ending, half in ((".lora_A.weight", "lora_a"), (".lora_B.weight", "lora_b")):
        if name.endswith(ending) and name.startswith(_PREFIX):
            return name.removeprefix(_PREFIX).removesuffix(ending), half
    raise DataError(f"{folder.name}: {quoted(name, 120)} is no A or B of LoRA; GGUF holds nothing else")


def _values(folder: Path, tensor: Tensor, raw: bytes) -> Any:
    import numpy as np

    if tensor.dtype == "BF16":
        widened = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
        return widened.view(np.float32).reshape(tensor.shape)
    kinds = {"F32": np.float32, "F16": np.float16}
    if tensor.dtype not in kinds:
        raise DataError(f"{folder.name}: {quoted(tensor.name)} holds {tensor.dtype}; GGUF takes F32, F16 and BF16")
    return np.frombuffer(raw, dtype=kinds[tensor.dtype]).reshape(tensor.shape)


def _check_shapes(tensors: list[tuple[str, Any]], base: GgufBase) -> None:
    """What llama.cpp checks when it loads: both halves there, and of the base's size."""
    halves = {name: values.shape for name, values in tensors}
    if not halves:
        raise DataError("the adapter holds no matrices")
    for name in sorted({name.rpartition(".")[0] for name in halves}):
        first, second = halves.get(f"{name}.lora_a"), halves.get(f"{name}.lora_b")
        if first is None or second is None or len(first) != 2 or len(second) != 2 or first[0] != second[1]:
            raise DataError(f"{name}: A and B do not belong together")
        if base.shapes is None:
            continue
        if name not in base.shapes:
            raise DataError(f"{name} is not in the base's GGUF; was the adapter trained on another base?")
        if base.shapes[name] != (first[1], second[0]):
            theirs, ours = "×".join(map(str, base.shapes[name])), f"{first[1]}×{second[0]}"
            raise DataError(f"{name} is {theirs} in the base and {ours} in the adapter; it was trained on another base")


def _need_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra.named("gguf", "an adapter for llama.cpp or Ollama")
