"""A folder to fill before it is published; nothing of it stays behind, also not of one whose process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tunesmith.core.ids import new_token

_MARK = ".staging-"


@contextlib.contextmanager
def staging_for(final: Path) -> Iterator[Path]:
    """A fresh folder beside `final`, locked while it is in use; gone afterwards unless it was renamed.

    Folders whose lock is free belonged to a killed process and are removed first. The lock on the parent makes
    "create and lock" one step for everybody who sweeps.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent):
        for left in final.parent.glob(f".*{_MARK}*"):
            _remove_if_free(left)
        staged = final.parent / f".{final.name}{_MARK}{new_token()}"
        staged.mkdir()
        handle = os.open(staged, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        os.close(handle)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_if_free(left: Path) -> None:
    try:
        handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
    except BlockingIOError:
        pass  # somebody is filling it
    finally:
        os.close(handle)
