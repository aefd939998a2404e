"""The folder that is shared with another program: every file is opened below its descriptor, and no link is followed.

Whoever may write there may ask for rounds, and do nothing else: names are fixed, files are plain, small and of an
owner that is expected, and what we write goes to a fresh file first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from tunesmith.core.errors import DataError, NotFound, Refused, quoted

PENDING, WORKING, RESULT, ARCHIVE = "pending.json", "working.json", "result.json", "archive"
MAX_DATA = 1 << 30
_CHUNK = 1 << 20
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LEFT_BEHIND = re.compile(r"\.result\.json\.[0-9a-f]{16}\.tmp\Z")
_ARCHIVED = re.compile(r"\d{8}T\d{6}\.\d{3}Z-.+\Z")


class DropFolder:
    """Valid inside `open_folder`."""

    def __init__(self, handle: int, owners: Collection[int]) -> None:
        self._handle = handle
        self._owners = owners

    def has(self, name: str) -> bool:
        """Whether anything has this name, a dangling link included."""
        try:
            os.lstat(name, dir_fd=self._handle)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, limit: int) -> bytes:
        """The content of a plain file. Raises DataError for everything else; never waits."""
        with self._open(name) as source:
            data = source.read(limit + 1)
        if len(data) > limit:
            raise DataError(f"it has more than {limit} bytes")
        return data

    def copy_data(self, path: str, target: Path) -> str:
        """Copy a file below the folder to one of our own; its SHA-256. The path was checked by the schema."""
        *above, name = path.split("/")
        digest, left = hashlib.sha256(), MAX_DATA
        with contextlib.ExitStack() as stack:
            handle = self._handle
            for part in above:
                handle = self._enter(stack, part, handle, path)
            source = stack.enter_context(self._open(name, handle))
            if os.fstat(source.fileno()).st_nlink > 1:  # it may be somebody's file that only we can read
                raise DataError("it has a second name (a hard link); write a file of its own")
            sink = stack.enter_context(target.open("xb"))
            while chunk := source.read(_CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise DataError(f"it has more than {MAX_DATA >> 20} MiB; prepare a dataset from it instead")
                digest.update(chunk)
                sink.write(chunk)
        return digest.hexdigest()

    def write(self, name: str, text: str) -> None:
        """The file has its old content or the new one. A link or a pipe of that name is replaced, not followed."""
        _write(self._handle, name, text)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)
        os.fsync(self._handle)

    def take(self) -> None:
        """pending.json becomes working.json. What a killed process was writing goes away."""
        for name in filter(_LEFT_BEHIND.match, os.listdir(self._handle)):
            self.remove(name)
        with contextlib.suppress(FileNotFoundError):  # the program took it back
            os.rename(PENDING, WORKING, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        os.fsync(self._handle)

    def archive(self, name: str, answer: str, keep: int) -> None:
        """Keep request and answer together below archive/; may be repeated. The move of working.json is its end."""
        with contextlib.ExitStack() as stack:
            archives = self._made(stack, ARCHIVE, self._handle)
            one = self._made(stack, name, archives)
            _write(one, RESULT, answer)
            os.rename(WORKING, PENDING, src_dir_fd=self._handle, dst_dir_fd=one)
            for handle in (one, archives, self._handle):
                os.fsync(handle)
            known = sorted(entry for entry in os.listdir(archives) if _ARCHIVED.match(entry))
            for old in known[: max(len(known) - keep, 0)]:
                shutil.rmtree(old, ignore_errors=True, dir_fd=archives)

    def _made(self, stack: contextlib.ExitStack, name: str, above: int) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
        return _entered(stack, name, above)

    def _enter(self, stack: contextlib.ExitStack, name: str, above: int, path: str) -> int:
        try:
            return _entered(stack, name, above)
        except OSError as error:
            raise DataError(f"{quoted(path, 200)} has no plain folder {quoted(name)} on its way") from error

    def _open(self, name: str, below: int | None = None) -> BinaryIO:
        try:
            handle = os.open(name, _PLAIN, dir_fd=self._handle if below is None else below)
        except OSError as error:
            raise DataError(_why_not_opened(error)) from None
        about = os.fstat(handle)
        problem = None
        if not stat.S_ISREG(about.st_mode):
            problem = "it is not a plain file"
        elif about.st_uid not in self._owners:
            problem = f"it belongs to user {about.st_uid}, who may not ask here; see --allow-user"
        if problem is not None:
            os.close(handle)
            raise DataError(problem)
        return os.fdopen(handle, "rb")


@contextlib.contextmanager
def open_folder(path: Path, allowed: Collection[int]) -> Iterator[DropFolder]:
    """The folder, if no stranger can write there. Files of its owner, of root, of ours and of `allowed` are read."""
    try:
        handle = os.open(path, _FOLDER)
    except OSError as error:
        raise NotFound(f"{path} cannot be used as a drop folder: {error.strerror}; make it: mkdir {path}") from None
    try:
        about = os.fstat(handle)
        if about.st_mode & stat.S_IWOTH:
            raise Refused(f"everybody may write to {path}, and could ask for rounds; chmod o-w {path}")
        yield DropFolder(handle, {about.st_uid, os.geteuid(), 0, *allowed})
    finally:
        os.close(handle)


def _entered(stack: contextlib.ExitStack, name: str, above: int) -> int:
    handle = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    stack.callback(os.close, handle)
    return handle


def _write(folder: int, name: str, text: str) -> None:
    """As `write_atomic`, but in a folder where others may have put links: the temporary file is always a fresh one."""
    temporary = f".{name}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as sink:
            sink.write(text.encode())
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def _why_not_opened(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    if error.errno == errno.ENXIO:
        return "it is not a plain file"
    return f"it cannot be opened: {error.strerror}"
