"""What a base model's own files say about it: architecture facts and tensor shapes. Standard library only, no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tunesmith.core.errors import ConfigError, quoted
from tunesmith.core.files import FileTooLarge, NotPlainFile, canonical_json, read_capped, sha256_text
from tunesmith.profiles.rules.lock import ArchitectureLock
from tunesmith.profiles.safetensors_header import HeaderCut, read_header

_MAX_CONFIG = 1 << 20
_MAX_TOKENIZER_CONFIG = 16 << 20  # lists every added token
_MAX_TEMPLATE = 1 << 20
_MAX_TOKENIZER = 256 << 20
_MAX_INDEX = 64 << 20
_MAX_HEADER = 100_000_000  # the format's own limit
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_architecture(folder: Path) -> ArchitectureLock:
    """The facts that are locked for a profile."""
    if not folder.is_dir():
        raise ConfigError(f"base model {folder}: {_why_no_folder(folder)}")
    config = _read_json(folder / "config.json", _MAX_CONFIG)
    tokenizer_path = folder / "tokenizer_config.json"
    tokenizer = _read_json(tokenizer_path, _MAX_TOKENIZER_CONFIG) if tokenizer_path.exists() else {}
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        if content.get("auto_map"):
            raise ConfigError(
                f"base model {folder}: {name} has auto_map, so it needs code of its own; tunesmith never executes it"
            )
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0]):
        raise ConfigError(f"base model {folder}: config.json must name exactly one model class in 'architectures'")
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ConfigError(f"base model {folder}: config.json has no 'model_type'")
    num_heads = _count(folder, config, "num_attention_heads")
    return ArchitectureLock(
        architecture=names[0],
        family=family,
        vocab_size=_count(folder, config, "vocab_size"),
        context=_count(folder, config, "max_position_embeddings"),
        hidden_size=_count(folder, config, "hidden_size"),
        num_layers=_count(folder, config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(folder, config, "num_key_value_heads", otherwise=num_heads),
        chat_template_sha256=_template_hash(folder, tokenizer),
    )


def _why_no_folder(folder: Path) -> str:
    """What is wanted instead of a file, or of a name on a model hub, and how to get it."""
    wanted = "the folder of a model in Hugging Face format (config.json, tokenizer, *.safetensors)"
    if folder.suffix.lower() == ".gguf":
        return (
            f"is a GGUF file, which cannot be trained; base.path must be {wanted}, the one that the GGUF file was "
            "made from. Targets of kind llamacpp serve the adapter on the GGUF file"
        )
    if folder.exists():
        return f"is a file; base.path must be {wanted}"
    if folder.parent.exists():
        return f"no such folder; put the model there or mend base.path: {wanted}"
    name = "/".join(folder.parts[-2:])  # as models are called on a hub
    return (
        f"no such folder; base.path must be {wanted}. If {name} is a model of a hub, run "
        f"`tunesmith base fetch {name} --to models/{folder.name}` and set base.path: models/{folder.name}"
    )


def read_shape(folder: Path) -> ModelShape:
    """What the memory of a training depends on; sizes that a config leaves out are what transformers takes then."""
    lock, config = read_architecture(folder), _read_json(folder / "config.json", _MAX_CONFIG)
    tensors = read_tensor_shapes(folder)
    return ModelShape(
        family=lock.family,
        hidden=lock.hidden_size,
        intermediate=_count(folder, config, "intermediate_size", otherwise=4 * lock.hidden_size),
        num_layers=lock.num_layers,
        num_heads=lock.num_heads,
        num_kv_heads=lock.num_kv_heads,
        head_size=_count(folder, config, "head_dim", otherwise=max(1, lock.hidden_size // lock.num_heads)),
        vocab_size=lock.vocab_size,
        is_tied="lm_head.weight" not in tensors,
        has_qk_norm=any(name.endswith((".q_norm.weight", ".k_norm.weight")) for name in tensors),
        num_parameters=sum(math.prod(shape) for shape in tensors.values()),
    )


def read_tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the headers of the safetensors files; no weight is read."""
    index = folder / _INDEX
    if index.exists():
        weight_map = _read_json(index, _MAX_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{index}: has no usable 'weight_map'")
        names = sorted(set(weight_map.values()))
    elif (folder / _WEIGHTS).exists():
        names = [_WEIGHTS]
    else:
        raise ConfigError(f"base model {folder}: neither {_WEIGHTS} nor {_INDEX}; save its weights as safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        if len(PurePosixPath(name).parts) != 1 or name in ("..", "."):
            raise ConfigError(f"{index}: names the file {quoted(name)} outside its folder")
        shapes.update(_shapes_in(folder / name))
    return shapes


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        entries, _, _ = read_header(path, _MAX_HEADER)
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except NotPlainFile:
        raise ConfigError(f"{path}: not a regular file") from None
    except HeaderCut:
        raise ConfigError(f"{path}: not a whole safetensors file; fetch it again") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{path}: not a safetensors file; fetch it again") from None


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path, limit))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not valid JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def _read_text(path: Path, limit: int) -> str:
    try:
        return read_capped(path, limit, follow_links=True).decode()
    except (FileNotFoundError, NotADirectoryError, NotPlainFile):
        raise ConfigError(f"{path}: no such file; is this folder a model in Hugging Face format?") from None
    except FileTooLarge:
        raise ConfigError(f"{path}: larger than {limit >> 20} MiB, which no such file is") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _count(folder: Path, config: dict[str, Any], key: str, otherwise: int | None = None) -> int:
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        said = "has no" if value is None else "has a bad"
        raise ConfigError(f"base model {folder}: config.json {said} '{key}'; it must be a whole number > 0")
    return value


def _template_hash(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    """Of the template's text, wherever it is kept: a file of its own wins over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return sha256_text(_read_text(file, _MAX_TEMPLATE))
    template = tokenizer.get("chat_template")
    if template is None:
        return None
    return sha256_text(template if isinstance(template, str) else canonical_json(template))


def read_control_tokens(folder: Path) -> tuple[str, ...]:
    """Texts that the tokenizer turns into special tokens wherever they stand, in a person's message too."""
    found: set[Any] = set()
    if (folder / "tokenizer.json").exists():
        added = _read_json(folder / "tokenizer.json", _MAX_TOKENIZER).get("added_tokens") or []
        found |= {token.get("content") for token in added if isinstance(token, dict) and token.get("special")}
    if (folder / "tokenizer_config.json").exists():
        config = _read_json(folder / "tokenizer_config.json", _MAX_TOKENIZER)
        decoder = config.get("added_tokens_decoder") or {}
        found |= {t.get("content") for t in decoder.values() if isinstance(t, dict) and t.get("special")}
        named = [value for key, value in config.items() if key.endswith("_token")]
        found |= {value.get("content") if isinstance(value, dict) else value for value in named}
    return tuple(sorted(token for token in found if isinstance(token, str) and token.strip()))


def adaptable_modules(shapes: dict[str, tuple[int, ...]]) -> frozenset[str]:
    """Modules whose weight is a matrix, so that a low-rank adapter can be added to it."""
    return frozenset(
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and math.prod(shape) > 0
    )


@dataclass(frozen=True)
class ModelShape:
    """What the memory of a base model depends on."""

    family: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    is_tied: bool
    has_qk_norm: bool
    num_parameters: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of one layer: inputs and outputs by name."""
        query, key = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def num_in_layer(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices().values())
