"""Which process it is, beyond a number that is used again; and how to end what a dead worker left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.core.clock import boot_id, boot_seconds
from tunesmith.programs.shim import Process, all_processes, descendants, read_process

MARKER = "TUNESMITH_ATTEMPT"
"""Environment variable of every process of an attempt; finds those whose shim was killed."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one start of one machine, and the attempt it works for."""

    pid: int
    start_ticks: int
    boot_id: str
    attempt_id: str
    place: str = ""
    """The folder that it works in: a copied workspace finds the identities of the original's processes in its store."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ProcessIdentity:
        raw = json.loads(text)
        place = str(raw.get("place", ""))
        return cls(int(raw["pid"]), int(raw["start_ticks"]), str(raw["boot_id"]), str(raw["attempt_id"]), place)


def identify(pid: int, attempt_id: str = "", place: Path | None = None) -> ProcessIdentity:
    """The identity of a running process; without /proc its start time is 0, and it is never taken for alive."""
    process = read_process(pid)
    where = "" if place is None else str(place)
    return ProcessIdentity(pid, process.start_ticks if process else 0, boot_id(), attempt_id, where)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs; a zombie does not."""
    process = _same(identity)
    return process is not None and bool(_living([process]))


def kill_orphans(identity: ProcessIdentity, grace_s: float, folder: Path) -> bool:
    """End a shim of a dead worker and everything of its attempt; True if there was anything to end.

    `folder` is the attempt's. A process that works in another one which is still there belongs to the workspace that
    ours was copied from, and is left alone.
    A shim ends its tree by itself when its worker dies, so it is given the grace to do so first.
    """
    is_of_original = identity.place not in ("", str(folder)) and Path(identity.place).exists()
    if identity.boot_id != boot_id() or is_of_original:
        return False
    found = is_alive(identity) or bool(processes_of_attempt(identity))
    deadline = boot_seconds() + grace_s
    while is_alive(identity) and boot_seconds() < deadline:
        time.sleep(0.02)
    kill_below(identity)
    return found


def kill_below(identity: ProcessIdentity) -> None:
    """KILL descendants and strays of the attempt again and again until none is left, then the shim."""
    killed: list[Process] = []
    deadline = boot_seconds() + _TIMEOUT_S
    while boot_seconds() < deadline:
        shim = _same(identity)
        below = processes_of_attempt(identity) + (descendants(identity.pid) if shim else [])
        # the shim last: as long as it lives, what it holds cannot get away from below it
        left = _living(below) or _living([shim] if shim else [])
        if not left:
            break
        for process in left:
            kill(process)
        killed += left
        time.sleep(0.005)
    _collect([process for process in killed + processes_of_attempt(identity) if process.pid != identity.pid])


def processes_of_attempt(identity: ProcessIdentity) -> list[Process]:
    """Processes that carry the attempt's marker or are in its shim's session; not the caller, not the shim."""
    wanted = f"{MARKER}={identity.attempt_id}".encode()
    # a number is not given out again while it names a session, so a stranger under it means that the session is over
    session = identity.pid if _same(identity) or read_process(identity.pid) is None else -1
    return [
        process
        for process in all_processes()
        if process.pid not in (os.getpid(), identity.pid)
        and process.start_ticks >= identity.start_ticks > 0
        and (process.session == session or (bool(identity.attempt_id) and wanted in _environ(process.pid)))
    ]


def _same(identity: ProcessIdentity) -> Process | None:
    process = read_process(identity.pid)
    if process is None or identity.boot_id != boot_id() or process.start_ticks != identity.start_ticks:
        return None
    return process


def _living(processes: list[Process]) -> list[Process]:
    return [process for process in processes if process.state not in "ZX"]


def _environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as source:
            return source.read(1 << 20).split(b"\0")
    except OSError:
        return []


def kill(process: Process) -> None:
    """KILL this very process, not one that got its number meanwhile."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _collect(dead: list[Process]) -> None:
    """Reap those that became our children when their shim died."""
    for process in dead:
        now = read_process(process.pid)
        if now is not None and now.parent == os.getpid() and now.start_ticks == process.start_ticks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0 if now.state == "Z" else os.WNOHANG)
