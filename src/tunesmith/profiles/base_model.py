"""The content of a base model's folder: which files count, and one digest over them.

Programs that load the base compute the digest from all its bytes. Whoever only has to know whether it is still the
same asks `known_digest`: it reads a file again only if it was touched since it was hashed.
"""

from __future__ import annotations

import contextlib
import json
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tunesmith.core.errors import ConfigError
from tunesmith.core.files import canonical_json, sha256_file, sha256_text, write_atomic

MODEL_CONFIG, MODEL_WEIGHTS = "config.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
_RECENT_NS = 2 * 10**9
"""A file changed less than this long ago is hashed again next time: clocks of file systems are coarse."""


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
    return (folder / MODEL_CONFIG).is_file() and not (folder / ADAPTER_CONFIG).exists()


def weights_path(folder: Path) -> Path:
    """The weights in a folder that holds an adapter or a model of its own."""
    return folder / (MODEL_WEIGHTS if is_whole_model(folder) else ADAPTER_WEIGHTS)


def files_beside_weights(folder: Path) -> list[Path]:
    """Tokenizer, template and settings of a base model: what a fully tuned copy of it takes along."""
    return [path for path in base_files(folder) if ".safetensors" not in path.name]


def base_digest(folder: Path) -> str:
    """sha256 over names and hashes of the files that count."""
    return sha256_text(canonical_json({path.name: sha256_file(path) for path in base_files(folder)}))


def known_digest(folder: Path, cache: Path) -> str:
    """`base_digest`, with the hashes of files that were not touched since: same file, size, time of content and node.

    `cache` may be lost or damaged at any time; then everything is read again. Raises ConfigError.
    """
    note = cache / "bases" / f"{sha256_text(str(folder.resolve()))[:32]}.json"
    known, kept, hashes = _read_note(note), {}, {}
    try:
        for path in base_files(folder):
            before = _identity(path)
            entry = known.get(path.name)
            is_known = isinstance(entry, dict) and entry.get("identity") == before
            found = str(known[path.name]["sha256"]) if is_known else sha256_file(path)
            hashes[path.name] = found
            if is_known or (_identity(path) == before and time.time_ns() - max(before[3:]) > _RECENT_NS):
                kept[path.name] = {"identity": before, "sha256": found}
    except OSError as error:
        raise ConfigError(f"base model: {folder} cannot be read ({error.strerror})") from None
    if kept != known:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(note, canonical_json({"v": 1, "files": kept}))
    return sha256_text(canonical_json(hashes))


def _identity(path: Path) -> list[int]:
    """The time of the node (ctime) changes with every write, and nobody can set it back."""
    about = path.stat()
    return [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _read_note(path: Path) -> dict[str, Any]:
    try:
        files = json.loads(path.read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return files if isinstance(files, dict) else {}


def _counts(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _COUNTED)


def base_problem(base: Path, *, told: Path | str | None = None) -> str | None:
    """Why a base model could not be loaded, as far as a glance tells; None: it looks whole.

    `told`: how the folder is called. By its name alone, unless told: this is also said to callers from outside.
    """
    named = base.name if told is None else told
    if not base.is_dir():
        return f"its base model, the folder {named}, is missing; put it there, or set base.path in the profile"
    if not (base / MODEL_CONFIG).is_file():
        return f"its base model, the folder {named}, has no {MODEL_CONFIG}; put a model in Hugging Face format there"
    return None


def version_problem(name: str, folder: Path) -> str | None:
    """The same for the folder of an adapter, or of a fully tuned model."""
    if not folder.is_dir():
        return f"the folder of {name} ({folder.name}) is missing; restore it from a backup, or roll back"
    if not weights_path(folder).is_file():
        return f"the folder of {name} ({folder.name}) has no {weights_path(folder).name}; restore it, or roll back"
    return None
