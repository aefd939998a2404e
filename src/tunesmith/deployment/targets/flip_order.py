"""Flips in the order in which they were wanted: one that comes late, from a worker that hung, moves nothing back.

Every change of what is wanted live has a time in the store, and they only grow. A target that can keep a file notes
the youngest it was flipped for, and refuses older ones. See docs/decisions/0020.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tunesmith.core.files import write_atomic
from tunesmith.deployment.targets.base import ServedAdapter, TargetError

_TIMEOUT_S = 5.0
_POLL_S = 0.02


class StaleFlip(TargetError):
    """Something that is wanted since was flipped already."""

    code = "stale_flip"


@runtime_checkable
class InOrder(Protocol):
    """A target that refuses to go back to what was wanted before."""

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        """`flip`, unless there was one with a greater `order`; then StaleFlip, and nothing changes."""


@dataclass(frozen=True)
class Order:
    """The youngest flip of a target, in a file; one process at a time flips."""

    path: Path

    @classmethod
    def beside(cls, state: Path) -> Order:
        """Of a target that keeps a state file."""
        return cls(state.with_suffix(".order"))

    @contextlib.contextmanager
    def entering(self, order: int) -> Iterator[None]:
        """Around a flip. The order is noted first: a crash in between is repaired by the same flip, never an older."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise TargetError(f"{self.path}: {error.strerror}") from error
        try:
            self._wait(handle)
            known = self._read()
            if order < known:
                raise StaleFlip(
                    f"it was flipped for something that is wanted since ({known} against {order}); if the store was "
                    f"restored from an older backup, remove {self.path}"
                )
            if order != known:
                self._write(order)
            yield
        finally:
            os.close(handle)

    def _wait(self, handle: int) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(handle, 20, 0).decode(errors="replace")
                    raise TargetError(
                        f"process {holder} has been flipping it for {_TIMEOUT_S:g} s; if it hangs, end that process"
                    ) from None
                time.sleep(_POLL_S)

    def _read(self) -> int:
        try:
            return int(self.path.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise TargetError(f"{self.path} cannot be read ({type(error).__name__}); remove it") from None

    def _write(self, order: int) -> None:
        try:
            write_atomic(self.path, str(order))
        except OSError as error:
            raise TargetError(f"{self.path}: {error.strerror}") from error
