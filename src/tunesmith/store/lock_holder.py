"""How long SQLite's lock on a store is waited for, and which process holds it, so that whoever waits can be told."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tunesmith.core import clock

_WAL_WRITE_BYTE = 120  # of the -shm file: SQLite's write lock in WAL mode
_PENDING_BYTE = 0x40000000  # of the store file: where the locks of the other journal modes begin
_LAST_BYTE = _PENDING_BYTE + 1 + 510
_STOPPED = ("T", "t")  # by a signal, by a debugger
_COMMAND_CHARS = 80


@dataclass(frozen=True)
class Patience:
    """How long a SQLite store waits for a lock that another process holds."""

    busy_s: float = 60.0
    """While the holder runs, or nobody can say who it is."""
    stopped_s: float = 60.0
    """While the holder is stopped (Ctrl-Z, SIGSTOP, a debugger)."""
    on_wait: Callable[[str], None] = lambda message: None
    """Called once, after a few seconds, with who is waited for."""


@dataclass(frozen=True)
class Holder:
    """A process of this machine."""

    pid: int
    command: str
    state: str
    since: datetime | None
    """When the process started; the kernel does not tell when it took the lock."""

    @property
    def is_stopped(self) -> bool:
        return self.state in _STOPPED

    def __str__(self) -> str:
        if self.pid == os.getpid():
            return "another thread of this process"
        started = "" if self.since is None else f", started {self.since:%Y-%m-%d %H:%M:%S} UTC"
        stopped = ", stopped" if self.is_stopped else ""
        return f"process {self.pid} on {socket.gethostname()} ({self.command}{started}{stopped})"

    @property
    def advice(self) -> str:
        if self.is_stopped:
            return f"let it go on with `kill -CONT {self.pid}`, or end it with `kill -KILL {self.pid}`"
        return "wait for it, or end it"


def find_holder(store: str) -> Holder | None:
    """Who keeps others from writing; None: nobody, or this machine does not say.

    The kernel's list is read, and the store's files are not opened for it: closing one of them would drop every
    lock that this process itself holds on it.
    """
    lines, store = _locks(), os.path.realpath(store)
    found = _pid_of(lines, f"{store}-shm", _WAL_WRITE_BYTE, _WAL_WRITE_BYTE, {"WRITE"})
    found = found or _pid_of(lines, store, _PENDING_BYTE, _LAST_BYTE, {"WRITE"})
    if found is None and not os.path.exists(f"{store}-shm"):  # a rollback journal: readers keep others from committing
        found = _pid_of(lines, store, _PENDING_BYTE, _LAST_BYTE, {"READ", "WRITE"})
    return None if found is None else _describe(found)


def is_in_use(store: str) -> bool:
    """Whether a process has the store open in WAL mode."""
    return _pid_of(_locks(), f"{os.path.realpath(store)}-shm", 0, 1 << 30, {"READ", "WRITE"}) is not None


def _locks() -> list[str]:
    try:
        return Path("/proc/locks").read_text().splitlines()
    except OSError:  # not Linux
        return []


def _pid_of(lines: list[str], path: str, first: int, last: int, kinds: set[str]) -> int | None:
    try:
        inode = str(os.stat(path).st_ino)
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) != 8 or words[1] == "->" or words[3] not in kinds or words[5].rpartition(":")[2] != inode:
            continue
        start, end = int(words[6]), last if words[7] == "EOF" else int(words[7])
        if start <= last and end >= first and int(words[4]) > 0:
            return int(words[4])
    return None


def _describe(pid: int) -> Holder:
    try:
        # behind the name, which may hold anything, come the state and, as the twentieth word, the start in clock ticks
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return Holder(pid, "unknown program", "", None)
    running_s = clock.boot_seconds() - int(words[19]) / os.sysconf("SC_CLK_TCK")
    return Holder(pid, _command(pid), words[0], clock.utc_now() - timedelta(seconds=max(0.0, running_s)))


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "unknown program"
    text = shlex.join(word for word in words if word)
    return text if len(text) <= _COMMAND_CHARS else f"{text[:_COMMAND_CHARS]}…"
