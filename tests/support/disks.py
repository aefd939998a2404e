"""Small disks for drills: a tmpfs of a few megabytes or a few inodes, in a mount namespace of the test process."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MakeDisk = Callable[..., "SmallDisk"]
_CLONE_NEWNS = 0x0002_0000
_PIECE = 64 << 10


class SmallDisk:
    """A mounted tmpfs that can be filled and emptied again."""

    def __init__(self, path: Path, *, megabytes: int, inodes: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        options = f"size={megabytes}m,nr_inodes={inodes},mode=0755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)

    @property
    def free_bytes(self) -> int:
        about = os.statvfs(self.path)
        return about.f_bavail * about.f_frsize

    def fill(self) -> None:
        """Until not one more byte fits."""
        with (self.path / "filler").open("ab", buffering=0) as sink:
            for size in (_PIECE, 4096, 1):
                try:
                    while True:
                        sink.write(b"\0" * size)
                except OSError:
                    continue

    def use_up_inodes(self) -> None:
        """Until not one more file can be made."""
        folder = self.path / "many"
        folder.mkdir(exist_ok=True)
        number = 0
        try:
            while True:
                (folder / str(number)).touch(exist_ok=False)
                number += 1
        except OSError:
            return

    def make_room(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)
        for file in (self.path / "many").glob("*"):
            file.unlink()

    def end(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture(scope="session")
def own_mounts() -> None:
    """A mount namespace for this process, so that what it mounts is gone with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.unshare(_CLONE_NEWNS) == 0
    if not made or subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True).returncode != 0:
        pytest.skip("small disks need the right to mount a tmpfs")


@pytest.fixture
def make_disk(own_mounts: None, tmp_path: Path) -> Iterator[MakeDisk]:
    """Mounts a small disk below the test's folder; `name` is where."""
    made: list[SmallDisk] = []

    def make(name: str = "one", *, megabytes: int = 64, inodes: int = 20_000) -> SmallDisk:
        made.append(SmallDisk(tmp_path / name, megabytes=megabytes, inodes=inodes))
        return made[-1]

    yield make
    for disk in made:
        disk.end()
