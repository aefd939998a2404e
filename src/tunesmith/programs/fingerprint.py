"""The code fingerprint: what, besides spec and data, decides which weights come out."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from tunesmith.core.files import canonical_json, sha256_text

SOURCES = (
    "models",
    "training/rules",
    "training/trainers",
    "datasets/columns.py",
    "datasets/example.py",
    "datasets/reading.py",
    "datasets/report.py",
    "datasets/split_files.py",
    "datasets/splits.py",
    "profiles/architecture.py",
    "profiles/base_model.py",
    "profiles/profile.py",
    "runs/spec.py",
)
"""Every module of ours that a trainer computes with. A dataset has a fingerprint of its own, so the code that prepared
it is not here; neither is SQL."""
_NOT_COMPUTING = ("queries.py", "tables.py", "bases")
"""Names of files and folders: SQL, and the fetching of base models, whose content has a digest of its own."""
_LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "trl", "bitsandbytes")
_IMPORT = re.compile(rb"^[ \t]*(?:from [\w.]+ import (?:\([^)]*\)|[^\n]*)|import [^\n]+)\n", re.MULTILINE)


@cache
def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that affect weights; 'none' where one is not installed."""
    return {name: _version(name) for name in _LIBRARIES}


@cache
def code_fingerprint() -> str:
    """sha256 over package version, source and library versions; computed at submit and again by the program.

    By content: neither the paths of modules nor their imports count, so that moving a module refuses no queued run.
    """
    sources = sorted(hashlib.sha256(_IMPORT.sub(b"", path.read_bytes())).hexdigest() for path in source_files())
    parts = {"tunesmith": _version("tunesmith"), "sources": sources, "libraries": library_versions()}
    return sha256_text(canonical_json(parts))


def source_files() -> list[Path]:
    """The files that are hashed; a name in SOURCES that leads nowhere raises, because it would be left out silently."""
    package = Path(__file__).resolve().parent.parent
    found: list[Path] = []
    for name in SOURCES:
        files = [package / name] if name.endswith(".py") else sorted((package / name).rglob("*.py"))
        if not files or not all(file.is_file() for file in files):
            raise FileNotFoundError(f"no source at {package / name}; reinstall tunesmith")
        found += [file for file in files if not {file.name, file.parent.name} & set(_NOT_COMPUTING)]
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
