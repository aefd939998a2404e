"""A base model's folder before a profile is written for it: everything that training and serving will need is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.errors import ConfigError, quoted
from tunesmith.core.files import NotPlainFile
from tunesmith.profiles.architecture import ModelShape, read_architecture, read_shape
from tunesmith.profiles.base_model import ADAPTER_CONFIG, MODEL_CONFIG, base_files
from tunesmith.profiles.rules.lock import ArchitectureLock
from tunesmith.profiles.safetensors_header import read_header

_MAX_HEADER = 100_000_000  # the format's own limit
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_WANTED = "the folder of a model in Hugging Face format (config.json, tokenizer, *.safetensors)"
_GGUF_ADVICE = (
    "GGUF files are for serving and cannot be trained; give the folder that the file was made from "
    '(see docs/start.md, "A GGUF file")'
)


@dataclass(frozen=True)
class BaseFacts:
    """What a first profile depends on."""

    lock: ArchitectureLock
    shape: ModelShape


def read_whole_base(folder: Path) -> BaseFacts:
    """The facts of a base that can be trained and served; ConfigError says what is missing, and what to do."""
    named = f"base model {folder}"
    _check_is_model(folder, named)
    lock, shape = read_architecture(folder), read_shape(folder)
    for path in base_files(folder):
        if path.name.endswith(".safetensors"):
            _check_weights(path)
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise ConfigError(
            f"{named}: has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt); "
            "copy the tokenizer files of the model into the folder"
        )
    if lock.chat_template_sha256 is None:
        raise ConfigError(
            f"{named}: has no chat template, so conversations can neither be trained nor served; use the instruct or "
            "chat version of the model, or put a chat_template.jinja that fits it into the folder"
        )
    return BaseFacts(lock, shape)


def _check_is_model(folder: Path, named: str) -> None:
    """Say what a folder holds instead of a model that can be trained."""
    if folder.suffix.lower() == ".gguf":
        raise ConfigError(f"{named}: is a GGUF file; {_GGUF_ADVICE}")
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{named}: {reason}; name {_WANTED}, or the id ORG/NAME of a model on a hub")
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read ({error.strerror})") from None
    has_weights = any(name.endswith(".safetensors") for name in names)
    if not has_weights and any(name.lower().endswith(".gguf") for name in names):
        raise ConfigError(f"{named}: holds GGUF files and no *.safetensors; {_GGUF_ADVICE}")
    if MODEL_CONFIG not in names and ADAPTER_CONFIG in names:
        raise ConfigError(f"{named}: holds an adapter ({ADAPTER_CONFIG}); name the folder of the model it was made for")
    if MODEL_CONFIG not in names:
        raise ConfigError(f"{named}: has no {MODEL_CONFIG}; name {_WANTED}")
    if not has_weights:
        raise ConfigError(
            f"{named}: has no *.safetensors; pickled weights (*.bin, *.pt) are never loaded: save the model again with "
            "save_pretrained(FOLDER), which writes safetensors"
        )


def _check_weights(path: Path) -> None:
    """Refuse a file that was cut: its tensors must end where the file ends."""
    try:
        entries, begin, size = read_header(path, _MAX_HEADER)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (OSError, NotPlainFile, ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise ConfigError(f"{path}: not a safetensors file; fetch it again") from None
    if begin + end != size:
        raise ConfigError(f"{path}: has {size} bytes, and its header says {begin + end}; fetch it again")


def is_tokenizer_complete(names: frozenset[str]) -> bool:
    """Whether a listing of file names holds a tokenizer."""
    return any(set(wanted) <= names for wanted in _TOKENIZERS)


def looks_like_path(text: str) -> bool:
    """Whether a text can only mean a path, never the id of a model on a hub."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or text.lower().endswith(".gguf") or "\\" in text


def no_such_base(text: str) -> ConfigError:
    return ConfigError(
        f"--base {quoted(text)}: no such folder, and no id of a model on a hub (ORG/NAME); name {_WANTED}, a hub id, "
        "or smollm2, a small real model that is fetched from the Python package index"
    )
