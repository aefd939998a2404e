"""What happens to an application that is left alone: SIGKILL of its worker, trainer, server, engine and store, seeded.

A worker, a server or a store that was killed is started again by whoever runs services; a trainer by its worker, an
engine by its server. Three crashes of one task park it for a person, so no round is hit more than twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.databases import Postgres
from support.fleet import programs_below
from support.left_alone import LeftAlone, Outage
from support.left_alone_checks import check_all
from support.workspaces import wait_for
from tunesmith.programs.shim import all_processes

_WRITE_LOCK = 120
"""The byte of SQLite's shared memory that a writer has locked from BEGIN IMMEDIATE to its end (WAL_WRITE_LOCK)."""
_MAX_CRASHES = 2
"""Of one round; the third would park its task."""


@dataclass(frozen=True)
class Fault:
    kind: str
    at: float
    run_id: str | None
    """The round that was under way."""
    detail: str


class Faults(threading.Thread):
    """Kills something every few seconds until it is told to end, and looks at everything after each."""

    def __init__(self, app: LeftAlone, seed: int, postgres: Postgres | None = None) -> None:
        super().__init__(name="faults", daemon=True)
        self.app, self.rng, self.postgres = app, random.Random(seed), postgres
        self.done: list[Fault] = []
        self.problem: BaseException | None = None
        self._stop_asked = threading.Event()
        self._crashes: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], str]] = {
            "trainer": self._trainer,
            "worker": self._worker,
            "server": self._server,
            "engine": self._engine,
            "store": self._store_of_files if postgres is None else self._store_server,
        }
        self._bag: list[str] = []

    def run(self) -> None:
        try:
            while not self._stop_asked.wait(self.rng.uniform(1.0, 6.0)):
                self._one()
        except BaseException as error:
            self.problem = error

    def end(self) -> None:
        """After the fault under way was looked at; raises what went wrong."""
        self.halt()
        self.raise_problem()

    def halt(self) -> None:
        self._stop_asked.set()
        if self.is_alive():
            self.join()

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem

    def _one(self) -> None:
        run_id = self._under_way()
        kind = self._next_kind(self._crashes[run_id or ""] < _MAX_CRASHES)
        begun = time.time()
        detail = self._kinds[kind]()
        if not detail:
            return  # there was nothing of the kind to kill
        if kind == "trainer" or "worker" in detail:
            self._crashes[self._under_way() or run_id or ""] += 1
        self.done.append(Fault(kind, begun, run_id, detail))
        check_all(self.app)

    def _next_kind(self, may_crash: bool) -> str:
        """Each kind equally often, in an order that the seed decides."""
        if not self._bag:
            self._bag = self.rng.sample(sorted(self._kinds), len(self._kinds))
        for kind in self._bag:
            if may_crash or kind in ("server", "engine"):
                self._bag.remove(kind)
                return kind
        return self.rng.choice(("server", "engine"))

    def _under_way(self) -> str | None:
        found = [each.run_id for each in self.app.rounds() if each.state not in ("deployed", "rejected", "failed")]
        return found[-1] if found else None

    # --- one kind each; what was hit, or nothing ---

    def _trainer(self) -> str:
        """A trainer or an evaluator; waits a while for one."""
        until = time.monotonic() + 20.0
        while time.monotonic() < until and not self._stop_asked.is_set():
            for pid, _ in programs_below(self.app.client.workspace.runs_dir):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if b"shim.py" in line:
                        continue
                    time.sleep(self.rng.uniform(0.0, 1.5))
                    os.kill(pid, signal.SIGKILL)
                    return "trainer" if b"training" in line else "evaluator"
            time.sleep(0.05)
        return ""

    def _worker(self) -> str:
        os.kill(self.app.worker.process.pid, signal.SIGKILL)
        return "worker"

    def _server(self) -> str:
        with self._outage("server"):
            os.kill(self.app.server.process.pid, signal.SIGKILL)
            self._wait_for_start(self.app.server.process.pid)
            self.app.wait_for_server()
        return "server"

    def _engine(self) -> str:
        """The server asks again by itself what the engine had not begun to answer."""
        pids = re.findall(r"engine_started pid=(\d+)", self.app.server.log.read_text(errors="replace"))
        if not pids:
            return ""
        with self._outage("engine"):
            try:
                os.kill(int(pids[-1]), signal.SIGKILL)
            except ProcessLookupError:
                return ""
            self.app.quality()
        return "engine"

    def _store_of_files(self) -> str:
        """Whoever writes to the SQLite file, in the middle of a transaction."""
        until = time.monotonic() + 20.0
        ours = {self.app.worker.process.pid: "worker", self.app.server.process.pid: "server"}
        shm = (self.app.client.workspace.data_dir / "store.db-shm").stat().st_ino
        while time.monotonic() < until:
            pid = _writer(shm)
            if pid not in ours:
                continue
            os.kill(pid, signal.SIGSTOP)
            if _writer(shm) != pid:  # it was just done
                os.kill(pid, signal.SIGCONT)
                continue
            if ours[pid] == "worker":
                os.kill(pid, signal.SIGKILL)
            else:
                with self._outage("server"):
                    os.kill(pid, signal.SIGKILL)
                    self._wait_for_start(pid)
                    self.app.wait_for_server()
            return f"{ours[pid]}, in mid-transaction"
        return ""

    def _store_server(self) -> str:
        """Every process of PostgreSQL at once; it is started again after a moment, and recovers."""
        assert self.postgres is not None
        with self._outage("store"):
            _kill_postgres(self.postgres)
            time.sleep(self.rng.uniform(0.2, 2.0))  # shorter than a lease: a longer outage counts as a crash
            self.postgres.start()
            wait_for(self._store_answers, 60.0, "for PostgreSQL")
        return "PostgreSQL, all its processes"

    def _store_answers(self) -> bool:
        with contextlib.suppress(Exception):
            return self.app.rounds() is not None
        return False

    @contextlib.contextmanager
    def _outage(self, what: str) -> Iterator[None]:
        outage = Outage(what, time.monotonic())
        self.app.outages.append(outage)
        yield
        outage.ended = time.monotonic()

    def _wait_for_start(self, killed: int) -> None:
        wait_for(lambda: self.app.server.process.pid != killed, 30.0, "for the server to be started again")


def _kill_postgres(server: Postgres) -> None:
    """The postmaster and all its children, so that nothing is written down at the end."""
    postmaster = server._server.get_pid()
    children = [process.pid for process in all_processes() if process.parent == postmaster]
    for pid in (postmaster, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (postmaster, *children)), 10.0, "for PostgreSQL")


def _writer(inode: int) -> int | None:
    """Who has the write lock of the SQLite store whose shared memory is that file."""
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        # 1: POSIX  ADVISORY  WRITE 5551 00:1b:202406 120 120
        if len(words) == 8 and words[3] == "WRITE" and words[5].endswith(f":{inode}"):
            first, last = int(words[6]), int(words[7])
            if first <= _WRITE_LOCK <= last:
                return int(words[4])
    return None
