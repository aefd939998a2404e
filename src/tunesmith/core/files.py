"""Files that are whole or absent: atomic writes, and folders published with a manifest of hashes.

A published folder holds ``manifest.json``, written last:
``{"v": 1, "files": {name: {"sha256", "bytes"}}, "meta": {}}``.
Its digest is the sha256 of the manifest's ``files`` part in canonical JSON, so it names the content, not the place.
Readers trust only what the manifest lists and what still has the listed hash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from tunesmith.core.errors import DataError

MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_MAX_MANIFEST = 8 << 20


@contextmanager
def private_files() -> Iterator[None]:
    """Inside it, whatever this process and its children create is for their user alone. Holds for the whole process."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@dataclass(frozen=True)
class Manifest:
    """What a published folder says it holds."""

    files: dict[str, dict[str, Any]]
    meta: dict[str, Any]

    @property
    def digest(self) -> str:
        return sha256_text(canonical_json(self.files))


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomic(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """The file has either its old content or the new one, also after a power cut. `mode` as far as the umask lets."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable; a failed fsync is a failure."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish_folder(staged: Path, final: Path, meta: dict[str, Any] | None = None) -> Manifest:
    """Turn a filled staging folder into a published one: hash, fsync, manifest, rename. Idempotent by content."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(staged.rglob("*")):
        if path.is_symlink():
            raise DataError(f"refused to publish {path.name}: a published folder holds no links")
        if path.is_dir():
            fsync_folder(path)  # the names in it; what they hold follows
            continue
        if path.name == MANIFEST:
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        name = path.relative_to(staged).as_posix()
        files[name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    manifest = Manifest(files, meta or {})
    write_atomic(staged / MANIFEST, canonical_json({"v": 1, "files": files, "meta": manifest.meta}))
    _make_durable_folder(final.parent)
    if (final / MANIFEST).exists() and read_manifest(final).digest == manifest.digest:
        shutil.rmtree(staged)
        return manifest
    os.rename(staged, final)
    fsync_folder(final.parent)
    return manifest


def copy_published(folder: Path, copy: Path) -> Manifest:
    """Copy what the manifest of a published folder lists: bytes, not modes, nothing beside them, no link followed."""
    manifest = read_manifest(folder)
    copy.mkdir(parents=True)
    for name in manifest.files:
        place = copy / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with open_plain(folder / name) as source, place.open("xb") as sink:
            shutil.copyfileobj(source, sink)
    return manifest


def _make_durable_folder(folder: Path) -> None:
    """A folder that was made a moment ago is lost with the power, and all in it, unless its parent knows its name."""
    if not folder.exists():
        _make_durable_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


class NotPlainFile(OSError):
    """A folder, a pipe or a device stands where a plain file was expected."""


class FileTooLarge(OSError):
    """A file has more bytes than its reader takes."""


def open_plain(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a file that a program may have replaced; OSError for a link, NotPlainFile for a pipe. Never waits."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotPlainFile(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(handle, "rb")


def read_capped(path: Path, limit: int, *, follow_links: bool = False) -> bytes:
    """The content of a plain file; FileTooLarge if it has more than `limit` bytes, else as `open_plain`."""
    with open_plain(path, follow_links=follow_links) as source:
        data = source.read(limit + 1)
    if len(data) > limit:
        raise FileTooLarge(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data


def json_lines(data: bytes) -> list[Any]:
    """The values of a JSONL text, without blank lines; ValueError at the first line that is not JSON."""
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a published folder; names that leave it, and links, are refused."""
    path = folder / MANIFEST
    try:
        if path.is_symlink():
            raise DataError(f"{path}: not a plain file")
        raw = json.loads(read_capped(path, _MAX_MANIFEST))
        files, meta = raw["files"], raw.get("meta", {})
        if raw["v"] != 1 or not isinstance(meta, dict):
            raise DataError(f"{path}: not a manifest of version 1")
        for name, entry in files.items():
            _check_name(folder, name)
            if not (isinstance(entry["sha256"], str) and isinstance(entry["bytes"], int)):
                raise DataError(f"{path}: the entry of {name!r} is malformed")
    except FileNotFoundError:
        raise DataError(f"{folder}: no {MANIFEST}, so it was never published whole") from None
    except NotPlainFile:
        raise DataError(f"{path}: not a plain file") from None
    except FileTooLarge:
        raise DataError(f"{path}: larger than any manifest tunesmith writes") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise DataError(f"{path}: not a readable manifest ({type(error).__name__})") from None
    return Manifest(files, meta)


def verify_folder(folder: Path, expected_digest: str | None = None) -> Manifest:
    """Recompute every hash of a published folder from the bytes on disk; raise at the first difference."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{folder}: {name} is missing")
        if path.stat().st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
            raise DataError(f"{folder}: {name} is not what the manifest says")
    if expected_digest is not None and manifest.digest != expected_digest:
        raise DataError(f"{folder}: its content is {manifest.digest[:12]}…, expected {expected_digest[:12]}…")
    return manifest


def _check_name(folder: Path, name: str) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\x00" in name:
        raise DataError(f"{folder}: the manifest names a file outside its folder")
    place = folder
    for part in pure.parts:
        place = place / part
        if place.is_symlink():
            raise DataError(f"{folder}: {name} is a link")
