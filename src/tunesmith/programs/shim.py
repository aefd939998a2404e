"""The shim between worker and program: it holds the whole process tree and takes it down when the worker goes.

It runs as a stand-alone file (``python -I -S shim.py``), so that it starts in milliseconds and shares nothing with the
worker but two pipes. It therefore imports the standard library only; what others need of it (the keepalive clock, the
walk over /proc) they import from here.

The shim leads its own session and is a child subreaper: whatever the program forks, double-forks or moves into another
session stays below it. It ends the tree when the lifeline closes (the worker died), when the worker says so, when the
keepalive is too old, and when the program itself ends and leaves something behind. Then it reports the exit code.

What the program prints comes through pipes into its files, up to a cap; other files with a cap are looked at all the
time. A program that passes a cap is killed at once, and the file is cut to it.

Lifeline, worker to shim:  ``term`` · ``stacks`` · ``kill GRACE_S``
Status, shim to worker:    ``over FILE`` · ``exit CODE``
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import NamedTuple, NoReturn

NO_SPACE_EXIT = 73
KEEPALIVE_EXIT = 76
CANNOT_START_EXIT = 127
_KEEPALIVE_SHARE = 0.9  # the program ends itself at 0.8; this is for one that does not, or cannot
PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_INTERVAL_S, _CLOSE_INTERVAL_S = 0.05, 0.005  # at files with a cap; closely while one grows fast
_FAST_BYTES = 1 << 20
_PORTION = 64 << 10
_PORTIONS = 16


class KeepaliveClock:
    """How long ago the worker renewed the keepalive file, as far as this process can know.

    The file holds ``COUNTER BOOT_SECONDS BOOT_ID``. The counter says that it was renewed; the stamp says when, which
    matters after this process itself was stopped: a renewal seen late is not a renewal made late.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._boot = _boot_id()
        self._content = self._read()
        self._looked = self._renewed = boot_now()

    def age_s(self) -> float:
        """Look at the file; seconds since its last renewal. A file that cannot be read counts as not renewed."""
        content, now = self._read(), boot_now()
        if content and content != self._content:
            # it changed between the last look and now; the stamp may say when, but not more than that
            self._renewed = min(max(self._stamp(content), self._looked), now)
            self._content = content
        self._looked = now
        return now - self._renewed

    def _read(self) -> bytes:
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not keep us waiting
            try:
                return os.read(handle, 200)
            finally:
                os.close(handle)
        except OSError:
            return b""

    def _stamp(self, content: bytes) -> float:
        try:
            _, seconds, boot = content.split()
            return float(seconds) if boot == self._boot else 0.0
        except ValueError:
            return 0.0


def keepalive_content(counter: int) -> bytes:
    """What a renewal writes; always of the same length, so that it can be written in place."""
    return b"%020d %020.6f %s\n" % (counter, boot_now(), _boot_id())


def boot_now() -> float:
    """Seconds since the machine started, suspend included: nobody can set this clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot_id() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as source:
            return source.read(100).strip()
    except OSError:
        return b"unknown-boot"


class Process(NamedTuple):
    """What /proc says about one process."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def read_process(pid: int) -> Process | None:
    """None when there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as source:
            # the name in parentheses may hold anything, so count from the last parenthesis
            fields = source.read(4096).rpartition(b")")[2].split()
        return Process(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def all_processes() -> list[Process]:
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return [process for pid in pids if (process := read_process(pid)) is not None]


def descendants(root: int) -> list[Process]:
    """Every process below `root`, zombies included."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def set_process_option(option: int, value: int) -> bool:
    """prctl(2); False where it does not exist."""
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Orphans among this process's descendants become its children instead of init's."""
    return set_process_option(_PR_SET_CHILD_SUBREAPER, 1)


def size_of(name: str) -> int:
    """Of a plain file; a link, a pipe and what is not there have none."""
    try:
        about = os.lstat(name)
    except OSError:
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else 0


class Outlet:
    """A stream of the program on its way into a file: a pipe, closed at its end or one byte beyond the cap."""

    def __init__(self, sink: int, cap: int) -> None:
        self.source, self.end = os.pipe()
        os.set_blocking(self.source, False)
        self.is_lost = False  # the disk did not take it
        self._sink = sink
        self._left = cap + 1

    def copy(self) -> bool:
        """What is there now, a bounded amount; False once nothing more comes."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PORTIONS if self.source >= 0 else 0):
                portion = os.read(self.source, _PORTION)[: self._left]
                self._write(portion)
                if not portion or not self._left:
                    os.close(self.source)
                    self.source = -1
                    break
            else:
                return self.source >= 0
        return False

    def _write(self, data: bytes) -> None:
        self._left -= len(data)
        try:
            while data:
                data = data[os.write(self._sink, data) :]
        except OSError:
            self.is_lost = True


class Shim:
    """One program under guard. Single-threaded, because a parent-death signal follows the thread that forked."""

    def __init__(self, lifeline: int, status: int, worker: int, caps: dict[str, int]) -> None:
        """`caps` by file: the first is what standard output goes to, the second what standard error goes to."""
        self._lifeline = lifeline
        self._status = status
        self._worker = worker
        self._wakeup, self._wakeup_end = os.pipe()
        self._program = 0
        self._code: int | None = None  # of the program, once it was reaped
        self._deadline: float | None = None  # when the tree is killed
        self._override: int | None = None  # the code to report instead
        self._orphan_grace_s = 5.0  # after the worker's death; well within what is left of its lease
        self._caps = caps
        self._sizes: dict[str, int] = {}
        self._over: str | None = None
        self._outlets = [Outlet(sink, cap) for sink, cap in zip((1, 2), caps.values(), strict=False)]

    def run(self, command: list[str], keepalive: str, lease_s: float) -> int:
        self._orphan_grace_s = min(5.0, lease_s / 4)
        become_subreaper()
        self._catch_signals()
        self._start(command)
        clock = KeepaliveClock(keepalive)
        interval, pause_s = min(_POLL_INTERVAL_S, lease_s / 20), 0.0
        while self._code is None and not self._is_due():
            self._listen(pause_s)
            self._reap()
            pause_s = _CLOSE_INTERVAL_S if self._grow_fast() else interval
            if os.getppid() != self._worker and self._deadline is None:
                self._end_after(self._orphan_grace_s)
            if clock.age_s() > _KEEPALIVE_SHARE * lease_s:
                self._override, self._deadline = KEEPALIVE_EXIT, boot_now()
        self._kill_all()
        self._finish_files()
        self._report(b"exit %d\n" % self._final_code())
        return 0

    def _grow_fast(self) -> bool:
        """Look at the files with a cap; whether one grows so fast that the next look must come soon."""
        is_fast = False
        for name, cap in self._caps.items():
            size = size_of(name)
            is_fast = is_fast or size - self._sizes.get(name, 0) > _FAST_BYTES
            self._sizes[name] = size
            if size > cap:  # it said too much: its tree is killed now
                self._deadline = boot_now()
                if self._over is None:
                    self._over = name
                    self._report(b"over %s\n" % name.encode())
        return is_fast

    def _finish_files(self) -> None:
        """Nobody writes any more: take in what is left in the pipes, and cut what passed its cap."""
        for outlet in self._outlets:
            while outlet.copy():
                pass
        self._grow_fast()
        for name, cap in self._caps.items():
            if size_of(name) > cap:
                with contextlib.suppress(OSError):
                    os.truncate(name, cap)

    def _catch_signals(self) -> None:
        for end in (self._wakeup, self._wakeup_end):
            os.set_blocking(end, False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)

    def _start(self, command: list[str]) -> None:
        shim = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # one that comes now must not get lost in the child
        self._program = os.fork()
        if self._program == 0:
            _become_program(command, shim, [outlet.end for outlet in self._outlets])
        for outlet in self._outlets:
            os.close(outlet.end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with contextlib.suppress(OSError):
            os.setpgid(self._program, self._program)

    def _listen(self, timeout_s: float) -> None:
        if self._deadline is not None:
            timeout_s = max(0.0, min(timeout_s, self._deadline - boot_now()))
        sources = [self._wakeup] + ([self._lifeline] if self._lifeline >= 0 else [])
        outlets = [outlet for outlet in self._outlets if outlet.source >= 0]
        ready, _, _ = select.select(sources + [outlet.source for outlet in outlets], [], [], timeout_s)
        for outlet in outlets:
            if outlet.source in ready:
                outlet.copy()
        if self._wakeup in ready and signal.SIGTERM in os.read(self._wakeup, 4096):
            self._send(signal.SIGTERM)  # a service manager signals everyone; only the program knows what to do with it
        if self._lifeline in ready:
            self._obey(os.read(self._lifeline, 4096))

    def _obey(self, commands: bytes) -> None:
        if not commands:
            self._lifeline = -1
            self._end_after(self._orphan_grace_s)
        for command in commands.splitlines():
            if command == b"term":
                self._send(signal.SIGTERM)
            elif command == b"stacks":
                self._send(signal.SIGUSR1)
            elif command.startswith(b"kill "):
                self._end_after(float(command[5:]))

    def _end_after(self, grace_s: float) -> None:
        self._send(signal.SIGTERM)
        deadline = boot_now() + grace_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _send(self, number: int) -> None:
        """To the program itself, whose pid is ours to use until it was reaped."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._program, number)

    def _is_due(self) -> bool:
        return self._deadline is not None and boot_now() >= self._deadline

    def _reap(self) -> bool:
        """Collect what has ended; False once nothing at all is left below the shim."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._program:
                self._code = os.waitstatus_to_exitcode(status)

    def _kill_all(self) -> None:
        """Kill and reap until no child is left. Orphans come to the shim, so no child means no descendant."""
        pause_s = 0.001
        while self._reap():
            below = descendants(os.getpid())
            # a group is killed at one stroke, so that nobody in it can fork away between the walk and the kill
            groups = {process.group for process in below} | ({self._program} if self._code is None else set())
            for group in groups - {os.getpgid(0), 0, 1}:
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
            for process in below:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(pause_s)
            pause_s = min(0.05, pause_s * 2)

    def _final_code(self) -> int:
        if self._override is not None:
            return self._override
        if self._code is not None and self._code >= 0 and any(outlet.is_lost for outlet in self._outlets[:1]):
            return NO_SPACE_EXIT
        return self._code if self._code is not None else -signal.SIGKILL

    def _report(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._status, line)


def _become_program(command: list[str], shim: int, outputs: list[int]) -> NoReturn:
    """In the child: dies with the shim, leads its own group, then is the program."""
    try:
        signal.set_wakeup_fd(-1)
        for stream, end in zip((1, 2), outputs, strict=False):
            os.dup2(end, stream)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.setpgid(0, 0)
        set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == shim:  # else the shim died before the option was set
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(CANNOT_START_EXIT)


def main(arguments: list[str]) -> int:
    """Arguments: LIFELINE_FD STATUS_FD WORKER_PID KEEPALIVE LEASE_S FILE=CAP,FILE=CAP,… COMMAND…

    The current folder is the program's; what it prints goes to our own standard output and error.
    """
    lifeline, status, worker = (int(text) for text in arguments[:3])
    for handle in (lifeline, status):
        os.set_inheritable(handle, False)
    named = (entry.rpartition("=") for entry in arguments[5].split(",") if entry)
    caps = {name: int(cap) for name, _, cap in named}
    return Shim(lifeline, status, worker, caps).run(arguments[6:], arguments[3], float(arguments[4]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
