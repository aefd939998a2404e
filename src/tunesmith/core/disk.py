"""Whether a disk can take what is written to it: free space, free inodes, and which errors mean that it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_WORDS = ("no space left on device", "disk quota exceeded", "read-only file system", "database or disk is full")
_MAX_CHAIN = 16
NEEDED_INODES = 64
"""Files that an attempt makes at least: its own, a checkpoint, an adapter, and SQLite's."""


def is_disk_trouble(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, says that the disk is full, over quota or read-only.

    By its words too: libraries that write files themselves raise errors of their own.
    """
    for _ in range(_MAX_CHAIN):
        if error is None:
            return False
        if isinstance(error, OSError) and error.errno in _ERRNOS:
            return True
        if says_disk_trouble(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def says_disk_trouble(text: str) -> bool:
    """Whether the text of an error is about a disk that is full, over quota or read-only."""
    start = text[:10_000].lower()
    return any(word in start for word in _WORDS)


@dataclass(frozen=True)
class Room:
    """What is left on the file system of a folder, for a user without privileges."""

    free_bytes: int
    free_inodes: int | None
    """None where the file system does not count them."""
    is_read_only: bool


def room_under(folder: Path) -> Room | None:
    """The room on the folder's file system; None where that cannot be known."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        about = os.statvfs(place)
    except OSError:
        return None
    inodes = about.f_favail if about.f_files else None
    return Room(about.f_bavail * about.f_frsize, inodes, bool(about.f_flag & os.ST_RDONLY))


def shortage(folders: Iterable[Path], needed_bytes: int, needed_inodes: int = NEEDED_INODES) -> str | None:
    """Why nothing should be started that writes to these folders; None if there is room on the disk of each."""
    seen: set[int] = set()
    for folder in folders:
        try:
            device = folder.stat().st_dev
        except OSError:
            continue  # not made yet: it will be on the disk of its parent
        room = None if device in seen else room_under(folder)
        seen.add(device)
        if room is None or not needed_bytes:
            continue
        if room.is_read_only:
            return f"the file system of {folder} is read-only"
        if room.free_bytes < needed_bytes:
            return f"no space left under {folder} ({_mb(room.free_bytes)} MB free, needs {_mb(needed_bytes)})"
        if room.free_inodes is not None and room.free_inodes < needed_inodes:
            return f"no inodes left under {folder} ({room.free_inodes} free, needs {needed_inodes})"
    return None


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}".removesuffix(".0")
