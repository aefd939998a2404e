"""The code fingerprint: what, besides spec and data, decides which weights come out."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

from tunesmith.core.files import canonical_json, sha256_text

_SOURCE_FOLDERS = ("core", "profiles", "runs", "models", "training", "datasets")
_LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "trl", "bitsandbytes")


@cache
def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that affect weights; 'none' where one is not installed."""
    return {name: _version(name) for name in _LIBRARIES}


@cache
def code_fingerprint() -> str:
    """sha256 over package version, source and library versions; computed at submit and again by the program."""
    package = Path(__file__).resolve().parent.parent
    sources = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in _SOURCE_FOLDERS
        for path in sorted((package / folder).rglob("*.py"))
    }
    parts = {"tunesmith": _version("tunesmith"), "sources": sources, "libraries": library_versions()}
    return sha256_text(canonical_json(parts))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
