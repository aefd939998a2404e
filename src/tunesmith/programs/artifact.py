"""Files that a program left: read without following links, at most so much; and whether a folder is an adapter."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Literal

from tunesmith.core import files
from tunesmith.core.errors import DataError, ProgramError
from tunesmith.core.files import MANIFEST, FileTooLarge, NotPlainFile, verify_folder
from tunesmith.profiles.base_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_CONFIG, MODEL_WEIGHTS
from tunesmith.programs.adapter_config import read_settings
from tunesmith.programs.adapter_fit import Base, misfit
from tunesmith.programs.protocol import Artifact
from tunesmith.programs.weights import read_header, weights_problem
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef

_MAX_FILES = 1000
_HARMLESS = {".safetensors", ".json", ".jinja", ".txt", ".md", ".model"}
"""What an adapter folder may hold: weights without pickle, and text."""

Problem = tuple[ErrorClass, str]


def inside(directory: Path, path: str) -> Path:
    """The place below the folder that a program named; raises ProgramError for anything that leaves it, or a link."""
    pure = PurePosixPath(path)
    root = directory.absolute()
    place = root / pure
    if not pure.parts or ".." in pure.parts or "\0" in path or not place.is_relative_to(root) or place == root:
        raise ProgramError(f"{path[:80]!r} is not below the program's folder")
    step = root
    try:
        for part in place.relative_to(root).parts:
            step = step / part
            if step.is_symlink():
                raise ProgramError(f"{path[:80]!r} goes through a link")
    except OSError:  # a name that is longer than any file's
        raise ProgramError(f"{path[:80]!r} is not below the program's folder") from None
    return place


def read_capped(path: Path, limit: int, digest: str | None = None) -> bytes:
    """A plain file of at most `limit` bytes, and with that sha256 if one is given; raises ProgramError."""
    try:
        data = files.read_capped(path, limit)  # neither a link nor a pipe can trap us
    except NotPlainFile:
        raise ProgramError(f"{path.name} is not a plain file") from None
    except FileTooLarge:
        raise ProgramError(f"{path.name} has more than {limit >> 20} MiB") from None
    except OSError as error:
        raise ProgramError(f"{path.name} cannot be read ({error.strerror})") from None
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise ProgramError(f"{path.name} is not what its digest says")
    return data


def adapter_problems(
    directory: Path,
    artifact: Artifact | None,
    start: AdapterRef | None,
    kind: Literal["adapter", "model"] = "adapter",
    base: Base | None = None,
) -> list[Problem]:
    """Why the adapter, or the fully tuned model, must not be registered; empty if it may.

    With `base` it must also fit that base and its recipe. Sizes are looked at before any byte is read.
    """
    if artifact is None:
        return [_mismatch("missing")]
    try:
        folder = inside(directory, artifact.path)
        present = _names_in(folder)
        _check_size(folder, present, base, kind)
        files = verify_folder(folder, artifact.digest).files
    except (ProgramError, DataError) as error:
        return [_mismatch(error.message)]
    problems = [_mismatch(f"{name[:80]!r} is not in its manifest") for name in present - {MANIFEST} - set(files)]
    problems += [
        _mismatch(f"{name[:80]!r} is of a kind that an adapter does not hold")
        for name in files
        if PurePosixPath(name).suffix not in _HARMLESS or not name.isprintable()
    ]
    config, file = (MODEL_CONFIG, MODEL_WEIGHTS) if kind == "model" else (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    missing = [name for name in (config, file) if name not in files]
    if missing:
        return problems + [_mismatch(f"{name} is missing") for name in missing]
    problems += [] if kind == "model" else _fit_problems(folder, base)
    if problems:
        return problems  # what is odd in itself is not read to its end
    weights = weights_problem(folder / file, Path(start.path) / file if start else None)
    return [(weights.error_class, f"artifact: {weights.message}")] if weights else []


def _names_in(folder: Path) -> set[str]:
    """Everything in it that is no folder; raises ProgramError for a link, and for more than an adapter can hold."""
    names: set[str] = set()
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ProgramError(f"{path.relative_to(folder).as_posix()[:80]!r} is a link")
        if not path.is_dir():
            names.add(path.relative_to(folder).as_posix())
        if len(names) > _MAX_FILES:
            raise ProgramError(f"it has more than {_MAX_FILES} files")
    return names


def _check_size(folder: Path, names: set[str], base: Base | None, kind: str) -> None:
    """A file may be sparse, and as large as it likes to say: to hash it would take for ever."""
    if base is None:
        return
    size, most = sum((folder / name).lstat().st_size for name in names), base.most_bytes(kind)
    if size > most:
        raise ProgramError(f"it has {size} bytes; of this recipe and base it can have {most} at most")


def _fit_problems(folder: Path, base: Base | None) -> list[Problem]:
    try:
        settings = read_settings(folder)
        problem = misfit(read_header(folder / ADAPTER_WEIGHTS), settings, base)
    except DataError as error:
        problem = error.message
    return [] if problem is None else [_mismatch(problem)]


def _mismatch(text: str) -> Problem:
    return ErrorClass.MISMATCH, f"artifact: {text}"
