"""Files that a program left: read without following links, at most so much; and whether a folder is an adapter."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Literal

from tunesmith.domain.program import Artifact
from tunesmith.domain.spec import AdapterRef
from tunesmith.domain.task import ErrorClass
from tunesmith.errors import DataError, ProgramError
from tunesmith.files import MANIFEST, verify_folder
from tunesmith.modeling.base_files import MODEL_CONFIG, MODEL_WEIGHTS
from tunesmith.programs.weights import weights_problem

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_HARMLESS = {".safetensors", ".json", ".jinja", ".txt", ".md", ".model"}
"""What an adapter folder may hold: weights without pickle, and text."""


def inside(directory: Path, path: str) -> Path:
    """The place below the folder that a program named; raises ProgramError for anything that leaves it, or a link."""
    pure = PurePosixPath(path)
    root = directory.absolute()
    place = root / pure
    if not pure.parts or ".." in pure.parts or "\0" in path or not place.is_relative_to(root) or place == root:
        raise ProgramError(f"{path[:80]!r} is not below the program's folder")
    step = root
    for part in place.relative_to(root).parts:
        step = step / part
        if step.is_symlink():
            raise ProgramError(f"{path[:80]!r} goes through a link")
    return place


def read_capped(path: Path, limit: int, digest: str | None = None) -> bytes:
    """A plain file of at most `limit` bytes, and with that sha256 if one is given; raises ProgramError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # neither a link nor a pipe can trap us
        with os.fdopen(handle, "rb") as source:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ProgramError(f"{path.name} is not a plain file")
            data = source.read(limit + 1)
    except OSError as error:
        raise ProgramError(f"{path.name} cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise ProgramError(f"{path.name} has more than {limit >> 20} MiB")
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise ProgramError(f"{path.name} is not what its digest says")
    return data


def adapter_problems(
    directory: Path, artifact: Artifact | None, start: AdapterRef | None, kind: Literal["adapter", "model"] = "adapter"
) -> list[tuple[ErrorClass, str]]:
    """Why the adapter, or the fully tuned model, must not be registered; empty if it may."""
    if artifact is None:
        return [(ErrorClass.MISMATCH, "artifact: missing")]
    try:
        folder = inside(directory, artifact.path)
        files = verify_folder(folder, artifact.digest).files
    except (ProgramError, DataError) as error:
        return [(ErrorClass.MISMATCH, f"artifact: {error.message}")]
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST}
    problems = [
        (ErrorClass.MISMATCH, f"artifact: {name[:80]!r} is not in its manifest") for name in present - set(files)
    ]
    problems += [
        (ErrorClass.MISMATCH, f"artifact: {name[:80]!r} is of a kind that an adapter does not hold")
        for name in files
        if PurePosixPath(name).suffix not in _HARMLESS
    ]
    config, file = (MODEL_CONFIG, MODEL_WEIGHTS) if kind == "model" else (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    missing = [name for name in (config, file) if name not in files]
    if missing:
        return problems + [(ErrorClass.MISMATCH, f"artifact: {name} is missing") for name in missing]
    problems += [] if kind == "model" else _config_problems(folder / ADAPTER_CONFIG)
    weights = weights_problem(folder / file, Path(start.path) / file if start else None)
    return problems + ([(weights.error_class, f"artifact: {weights.message}")] if weights else [])


def _config_problems(path: Path) -> list[tuple[ErrorClass, str]]:
    try:
        config = json.loads(read_capped(path, 1 << 20))
        is_lora = isinstance(config, dict) and config.get("peft_type") == "LORA"
    except (ProgramError, ValueError, RecursionError):
        is_lora = False
    return [] if is_lora else [(ErrorClass.MISMATCH, f"artifact: {ADAPTER_CONFIG} does not describe a LoRA adapter")]
