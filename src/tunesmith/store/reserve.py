"""The reserve of an SQLite store: space and inodes kept beside it, so that control still works on a full disk.

A write that people or workers need (cancel, e-stop, the end of an attempt, a heartbeat) takes a piece of the reserve
when the disk is nearly full. Writes of bulk (captures, imports, datasets) are refused then. Once there is room again,
the reserve is filled up. It is a folder beside the store, `store.db-reserve/`, and nobody reads what is in it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.disk import Room, room_under

_PIECES = 16
_PIECE_BYTES = 128 << 10
_FLOOR_BYTES = 256 << 10
"""Below this a transaction might not find room for its pages."""
_FLOOR_INODES = 4
"""Files that SQLite makes beside the store: the write-ahead log, its index, a journal."""
_BULK_BYTES = 1 << 20
_PLENTY = 4
"""The reserve is only filled up where this many times its size is free."""


@dataclass(frozen=True)
class Standing:
    """How a write finds the disk of its store."""

    is_low: bool
    refusal: str | None = None
    """Why a bulk write must not begin."""


class Reserve:
    def __init__(self, store: Path) -> None:
        self.folder = store.with_name(f"{store.name}-reserve")

    def before_write(self, *, bulk: bool) -> Standing:
        """Look at the disk; on one that is nearly full a piece is released, unless the write is bulk."""
        room = room_under(self.folder.parent)
        if room is None or not _is_low(room, _BULK_BYTES):
            return Standing(is_low=False)
        if bulk:
            refusal = f"no space left under {self.folder.parent} ({room.free_bytes >> 10} KB free)"
            return Standing(is_low=True, refusal=refusal)
        if _is_low(room, _FLOOR_BYTES):
            self.release()
        return Standing(is_low=True)

    def release(self) -> bool:
        """Give one piece back to the disk; False where nothing is left."""
        for piece in self._pieces():
            with contextlib.suppress(OSError):
                piece.unlink()
                return True
        return False

    def fill_up(self) -> None:
        """Make the pieces that are missing, where there is plenty of room; never raises."""
        with contextlib.suppress(OSError):
            missing = {str(number) for number in range(_PIECES)} - {piece.name for piece in self._pieces()}
            room = room_under(self.folder.parent)
            if not missing or room is None or _is_low(room, _PLENTY * _PIECES * _PIECE_BYTES, _PLENTY * _PIECES):
                return
            self.folder.mkdir(mode=0o700, exist_ok=True)
            for name in sorted(missing):
                _make_piece(self.folder / name)

    def _pieces(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if path.name.isdecimal()]
        except OSError:
            return []


def _is_low(room: Room, free_bytes: int, free_inodes: int = _FLOOR_INODES) -> bool:
    return room.free_bytes < free_bytes or (room.free_inodes is not None and room.free_inodes < free_inodes)


def _make_piece(path: Path) -> None:
    """A file with real blocks; a sparse one would keep nothing free."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return  # another process was quicker
    try:
        os.posix_fallocate(handle, 0, _PIECE_BYTES)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
