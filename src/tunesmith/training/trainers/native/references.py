"""Reference log-probabilities, cached between attempts and runs: the same start, data and settings give the same ones.

The cache key is a hash of everything they depend on. Each entry is one file in a folder of bounded size. A damaged file
is never used: the values are computed again. Packing and the number of processes change only the last digits, so they
are not in the key, and a training that resumes with smaller packs keeps its reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tunesmith.core.clock import boot_seconds
from tunesmith.core.errors import DataError
from tunesmith.core.files import canonical_json, sha256_text, write_atomic
from tunesmith.models.packs import Item
from tunesmith.runs.spec import RunSpec, TrainSpec
from tunesmith.training.trainers.native.distributed import TrainingGroup
from tunesmith.training.trainers.native.objectives import Reference

MAX_FILES, MAX_BYTES = 32, 1 << 30
_FOLDER, _SUFFIX = "references", ".safetensors"
_ARRAYS = ("sums", "counts", "ids")
_KEY_CHARACTERS = 12
_NOT_IN_KEY = frozenset(
    {"lr", "epochs", "max_steps", "batch_tokens", "micro_batch_tokens", "packing", "seed", "beta", "orpo_nll"}
    | {"desirable_weight", "undesirable_weight", "warmup", "schedule", "weight_decay", "max_grad_norm"}
    | {"lora_rank", "lora_alpha", "lora_dropout", "rslora", "activation_checkpointing"}
)
"""Recipe settings that do not change the log-probabilities of the starting weights: a fresh adapter adds zero, whatever
its shape. Every other setting is part of the key."""


def cached_reference(
    spec: TrainSpec,
    adapted: Any,
    group: TrainingGroup,
    log: Callable[[str, str], None],
    compute: Callable[[Sequence[Item]], Reference],
    items: Sequence[Item],
) -> Reference:
    """Return the log-probabilities of these items under the starting weights, from the cache or computed and cached.

    Every rank must call this. Only rank 0 reads and writes the cache, so that all ranks take the same branch.
    """
    if spec.cache_dir is None:
        return compute(items)
    cache, key = ReferenceCache(Path(spec.cache_dir) / _FOLDER), ""
    kept: Reference | None = None
    if group.rank == 0:
        key = reference_key(spec.run, items, precision_of(adapted))
        kept = _read_cached(cache, key, items, log)
    kept = group.all_gather(kept)[0]
    if kept is not None:
        log(f"reference log-probabilities of {len(kept)} items: taken from the cache ({key[:_KEY_CHARACTERS]})", "info")
        return kept
    before = boot_seconds()
    found = compute(items)
    seconds = max(boot_seconds() - before, 1e-9)
    rate = f"{seconds:.1f} s, {len(found) / seconds:.0f} items/s"
    log(f"reference log-probabilities of {len(found)} items: computed in {rate} ({key[:_KEY_CHARACTERS]})", "info")
    if group.rank == 0:
        _store(cache, key, found, log)
    return found


def reference_key(run: RunSpec, items: Sequence[Item], precision: Sequence[str]) -> str:
    """sha256 over everything that decides the log-probabilities of these items."""
    facts = {
        "v": 1,
        "code": run.fingerprints.code,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "precision": list(precision),
        "base": run.base.digest,  # tokenizer and chat template included
        "start": run.start.digest if run.start else None,
        "dataset": run.dataset.fingerprint,
        "method": run.method.value,
        "context": run.base.context,
        "recipe": run.recipe.model_dump(mode="json", exclude=set(_NOT_IN_KEY)),
        "items": _digest_of(items),
    }
    return sha256_text(canonical_json(facts))


def precision_of(model: Any) -> tuple[str, ...]:
    """The kind of device, and the number formats of the weights."""
    weights = list(model.parameters())
    return (weights[0].device.type, *sorted({str(weight.dtype) for weight in weights}))


@dataclass(frozen=True)
class ReferenceCache:
    """A folder with one file per key: float64 sums of log-probabilities, the items' ids, and a hash over both."""

    folder: Path
    max_files: int = MAX_FILES
    max_bytes: int = MAX_BYTES

    def read(self, key: str) -> Reference | None:
        """Return the entry or None. Raises DataError if the file is damaged or belongs to another key."""
        path = self._path(key)
        try:
            about = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(about.st_mode) or about.st_size > self.max_bytes:
            raise DataError(f"{path.name} is not a file that tunesmith keeps")
        try:
            with safe_open(path, framework="numpy") as source:
                metadata = json.loads((source.metadata() or {}).get("about", "{}"))
                arrays = {name: source.get_tensor(name) for name in _ARRAYS}
        except (SafetensorError, ValueError, TypeError) as error:
            raise DataError(f"{path.name} cannot be read ({type(error).__name__})") from None
        if metadata != {"v": 1, "key": key, "sha256": _hash_of(key, arrays)}:
            raise DataError(f"{path.name} is not what was written")
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used files are evicted first
        ids, sums = json.loads(arrays["ids"].tobytes()), arrays["sums"].tolist()
        ends = arrays["counts"].cumsum().tolist()
        return {
            name: sums[end - num : end] for name, end, num in zip(ids, ends, arrays["counts"].tolist(), strict=True)
        }

    def store(self, key: str, reference: Reference) -> None:
        """Write an entry atomically, then evict the least recently used ones."""
        arrays = {
            "sums": numpy.array([value for values in reference.values() for value in values], dtype=numpy.float64),
            "counts": numpy.array([len(values) for values in reference.values()], dtype=numpy.int64),
            "ids": numpy.frombuffer(canonical_json(list(reference)).encode(), dtype=numpy.uint8),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        about = canonical_json({"v": 1, "key": key, "sha256": _hash_of(key, arrays)})
        write_atomic(self._path(key), save(arrays, {"about": about}))
        self._evict(self._path(key))

    def _evict(self, newest: Path) -> None:
        """Delete the oldest files beyond the limits, including partial files of killed processes."""
        known = [(path, about) for path in self.folder.iterdir() if (about := _about(path)) is not None]
        known.sort(key=lambda one: (one[0] == newest, one[1].st_mtime_ns), reverse=True)
        total = 0
        for number, (path, about) in enumerate(known):
            total += about.st_size
            if number and (number >= self.max_files or total > self.max_bytes):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"


def _read_cached(
    cache: ReferenceCache, key: str, items: Sequence[Item], log: Callable[[str, str], None]
) -> Reference | None:
    try:
        kept = cache.read(key)
        if kept is not None and any(len(kept.get(item.id, ())) != len(item.completions) for item in items):
            raise DataError(f"{key[:_KEY_CHARACTERS]} does not hold the items it is named for")
    except (DataError, OSError) as error:
        log(f"cached reference log-probabilities are not used and are computed again: {error}", "warning")
        return None
    return kept


def _store(cache: ReferenceCache, key: str, found: Reference, log: Callable[[str, str], None]) -> None:
    """Write to the cache; a failure to write never ends a training."""
    if not all(math.isfinite(value) for values in found.values() for value in values):
        return  # the first step will fail; do not cache these values
    try:
        cache.store(key, found)
    except OSError as error:
        log(f"reference log-probabilities could not be cached: {error}", "warning")


def _digest_of(items: Sequence[Item]) -> str:
    """Hash ids, tokens and target positions of the items, independent of their order."""
    digest = hashlib.sha256()
    for item in sorted(items, key=lambda item: item.id):
        arrays = item.arrays
        parts = (arrays.ids, arrays.bounds, arrays.sources, arrays.spans)
        digest.update(canonical_json([item.id, *(len(part) for part in parts)]).encode())
        for part in parts:
            digest.update(part.tobytes())
    return digest.hexdigest()


def _hash_of(key: str, arrays: dict[str, Any]) -> str:
    digest = hashlib.sha256(key.encode())
    for name in _ARRAYS:
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _about(path: Path) -> os.stat_result | None:
    """Return the file's status; None if it was removed meanwhile or is not a regular file."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    return about if stat.S_ISREG(about.st_mode) else None
