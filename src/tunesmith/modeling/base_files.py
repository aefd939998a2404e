"""The content of a base model's folder: which files count, and one digest over them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from tunesmith.errors import ConfigError
from tunesmith.files import canonical_json, sha256_file, sha256_text

MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_COUNTED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
)
"""What decides how the model reads and answers. A README or a licence may change; nothing here may."""


def base_files(folder: Path) -> list[Path]:
    """The files of a base model that count, sorted by name."""
    if not folder.is_dir():
        raise ConfigError(f"base model: {folder} is not a folder; set base.path to a folder in Hugging Face format")
    files = [path for path in folder.iterdir() if path.is_file() and _counts(path.name)]
    names = {path.name for path in files}
    if "config.json" not in names:
        raise ConfigError(f"base model: {folder} has no config.json, so it is not in Hugging Face format")
    if not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"base model: {folder} has no *.safetensors; convert its weights: pickled ones are never loaded"
        )
    return sorted(files, key=lambda path: path.name)


def is_whole_model(folder: Path) -> bool:
    """Whether a folder holds a model of its own rather than an adapter."""
    return (folder / MODEL_CONFIG).is_file() and not (folder / _ADAPTER_CONFIG).exists()


def weights_path(folder: Path) -> Path:
    """The weights in a folder that holds an adapter or a model of its own."""
    return folder / (MODEL_WEIGHTS if is_whole_model(folder) else "adapter_model.safetensors")


def files_beside_weights(folder: Path) -> list[Path]:
    """Tokenizer, template and settings of a base model: what a fully tuned copy of it takes along."""
    return [path for path in base_files(folder) if ".safetensors" not in path.name]


def base_digest(folder: Path) -> str:
    """sha256 over names and hashes of the files that count."""
    return sha256_text(canonical_json({path.name: sha256_file(path) for path in base_files(folder)}))


def _counts(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _COUNTED)
