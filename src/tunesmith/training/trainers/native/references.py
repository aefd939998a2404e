"""Reference log-probabilities, kept between attempts and runs: the same start, data and settings give the same ones.

They are kept under a key that names everything they depend on, each in a file of its own in a folder of bounded size.
What is damaged or is not what its name says is never used: the model is asked again. How items are packed, and how many
processes ask, changes no more than the last digits; a training that goes on with smaller packs keeps its reference.
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
from tunesmith.training.trainers.native.distributed import Team
from tunesmith.training.trainers.native.objectives import Reference

MAX_FILES, MAX_BYTES = 32, 1 << 30
_FOLDER, _SUFFIX = "references", ".safetensors"
_ARRAYS = ("sums", "counts", "ids")
_SHOWN = 12
HARMLESS = frozenset(
    {"lr", "epochs", "max_steps", "batch_tokens", "micro_batch_tokens", "packing", "seed", "beta", "orpo_nll"}
    | {"desirable_weight", "undesirable_weight", "warmup", "schedule", "weight_decay", "clip"}
    | {"lora_rank", "lora_alpha", "lora_dropout", "rslora", "activation_checkpointing"}
)
"""Settings of a recipe that change nothing about the answers of the starting weights, except which items are asked for:
a fresh adapter adds nothing, whatever its shape. A setting that is not named here counts."""


def recalled(
    spec: TrainSpec,
    adapted: Any,
    team: Team,
    log: Callable[[str, str], None],
    ask: Callable[[Sequence[Item]], Reference],
    items: Sequence[Item],
) -> Reference:
    """What the starting weights give the answers of these items: as kept, or asked for now and kept.

    The whole team calls this together. Its leader alone looks and keeps, so that all take the same way.
    """
    if spec.cache_dir is None:
        return ask(items)
    shelf, key = Shelf(Path(spec.cache_dir) / _FOLDER), ""
    kept: Reference | None = None
    if team.rank == 0:
        key = reference_key(spec.run, items, precision_of(adapted))
        kept = _look(shelf, key, items, log)
    kept = team.gathered(kept)[0]
    if kept is not None:
        log(f"reference log-probabilities of {len(kept)} items: taken from the cache ({key[:_SHOWN]})", "info")
        return kept
    before = boot_seconds()
    found = ask(items)
    seconds = max(boot_seconds() - before, 1e-9)
    rate = f"{seconds:.1f} s, {len(found) / seconds:.0f} items/s"
    log(f"reference log-probabilities of {len(found)} items: computed in {rate} ({key[:_SHOWN]})", "info")
    if team.rank == 0:
        _keep(shelf, key, found, log)
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
        "recipe": run.recipe.model_dump(mode="json", exclude=set(HARMLESS)),
        "items": _digest_of(items),
    }
    return sha256_text(canonical_json(facts))


def precision_of(model: Any) -> tuple[str, ...]:
    """The kind of device, and the number formats of the weights."""
    weights = list(model.parameters())
    return (weights[0].device.type, *sorted({str(weight.dtype) for weight in weights}))


@dataclass(frozen=True)
class Shelf:
    """A folder with one file per key: sums of log-probabilities as float64, the items' ids, and a hash over both."""

    folder: Path
    max_files: int = MAX_FILES
    max_bytes: int = MAX_BYTES

    def read(self, key: str) -> Reference | None:
        """None where there is none; DataError where it is not what was kept under this key."""
        path = self._path(key)
        try:
            about = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(about.st_mode) or about.st_size > self.max_bytes:
            raise DataError(f"{path.name} is not a file that tunesmith keeps")
        try:
            with safe_open(path, framework="numpy") as source:
                said = json.loads((source.metadata() or {}).get("about", "{}"))
                arrays = {name: source.get_tensor(name) for name in _ARRAYS}
        except (SafetensorError, ValueError, TypeError) as error:
            raise DataError(f"{path.name} cannot be read ({type(error).__name__})") from None
        if said != {"v": 1, "key": key, "sha256": _hash_of(key, arrays)}:
            raise DataError(f"{path.name} is not what was written")
        with contextlib.suppress(OSError):
            os.utime(path)  # what is used stays longest
        ids, sums = json.loads(arrays["ids"].tobytes()), arrays["sums"].tolist()
        ends = arrays["counts"].cumsum().tolist()
        return {
            name: sums[end - num : end] for name, end, num in zip(ids, ends, arrays["counts"].tolist(), strict=True)
        }

    def keep(self, key: str, reference: Reference) -> None:
        """Publish it whole, then make room: of what is there, the longest unused goes first."""
        arrays = {
            "sums": numpy.array([value for values in reference.values() for value in values], dtype=numpy.float64),
            "counts": numpy.array([len(values) for values in reference.values()], dtype=numpy.int64),
            "ids": numpy.frombuffer(canonical_json(list(reference)).encode(), dtype=numpy.uint8),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        about = canonical_json({"v": 1, "key": key, "sha256": _hash_of(key, arrays)})
        write_atomic(self._path(key), save(arrays, {"about": about}))
        self._make_room(self._path(key))

    def _make_room(self, newest: Path) -> None:
        """Half-written files of processes that were killed count too, and go in their turn."""
        known = [(path, about) for path in self.folder.iterdir() if (about := _about(path)) is not None]
        known.sort(key=lambda one: (one[0] == newest, one[1].st_mtime_ns), reverse=True)
        total = 0
        for number, (path, about) in enumerate(known):
            total += about.st_size
            if number and (number >= self.max_files or total > self.max_bytes):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"


def _look(shelf: Shelf, key: str, items: Sequence[Item], log: Callable[[str, str], None]) -> Reference | None:
    try:
        kept = shelf.read(key)
        if kept is not None and any(len(kept.get(item.id, ())) != len(item.completions) for item in items):
            raise DataError(f"{key[:_SHOWN]} does not hold the items it is named for")
    except (DataError, OSError) as error:
        log(f"kept reference log-probabilities are not used, the model is asked again: {error}", "warning")
        return None
    return kept


def _keep(shelf: Shelf, key: str, found: Reference, log: Callable[[str, str], None]) -> None:
    """A training never ends because something could not be kept for later."""
    if not all(math.isfinite(value) for values in found.values() for value in values):
        return  # the first step will tell; nobody should find these again
    try:
        shelf.keep(key, found)
    except OSError as error:
        log(f"reference log-probabilities are not kept for later: {error}", "warning")


def _digest_of(items: Sequence[Item]) -> str:
    """Over ids and tokens, and which of them count; not over the order."""
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
    """None for what somebody else just removed, and for what is no file."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    return about if stat.S_ISREG(about.st_mode) else None
