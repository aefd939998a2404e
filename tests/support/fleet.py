"""Stories with real worker processes: a fleet that always ends with its test, and looks into what it left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.databases import BOTH, Postgres
from support.workspaces import (
    PROFILE,
    AnyProcess,
    a_jsonl,
    a_workspace,
    cli_environ,
    start_worker,
    wait_for,
    wait_for_state,
)
from tunesmith.client import Client
from tunesmith.client.views import AttemptView
from tunesmith.core.files import verify_folder
from tunesmith.datasets import queries as datasets
from tunesmith.experience.queries import experiences
from tunesmith.programs.process_identity import MARKER
from tunesmith.programs.shim import all_processes
from tunesmith.runs.rules.run import RUN
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store.database import Database

Rows = dict[str, list[dict[str, Any]]]
MakeFleet = Callable[..., "Fleet"]
_numbers = itertools.count(1)


class Fleet:
    """A workspace and its worker processes. `end` leaves none behind, whatever the test did to them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.root = client.workspace.root
        self.processes: list[AnyProcess] = []

    def start(
        self,
        *kinds: str,
        until_idle: bool = False,
        env: Mapping[str, str] | None = None,
        under: tuple[str, ...] = (),
        real: bool = False,
    ) -> AnyProcess:
        """`tunesmith worker`, for all kinds of tasks or only some; `under` goes in front of it.

        It is forked from a warm process unless it runs under something, or `real` asks for an interpreter of its own.
        """
        words = [*(["--until-idle"] if until_idle else []), *(["--kinds", ",".join(kinds)] if kinds else [])]
        log = self.log(len(self.processes))
        if not under:
            self.processes.append(start_worker(self.client, *words, env=env, log=log, real=real))
            return self.processes[-1]
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [*under, sys.executable, "-m", "tunesmith.cli.main", "worker", *words],
                cwd=self.root,
                env=cli_environ(env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        self.processes.append(process)
        return process

    def freeze(self, worker: AnyProcess) -> None:
        """Stop a worker between two transactions: one that held SQLite's write lock would stop everybody else."""
        with self.database.write() if self.database.engine.dialect.name == "sqlite" else contextlib.nullcontext():
            os.kill(worker.pid, signal.SIGSTOP)
            wait_for(lambda: Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def log(self, number: int) -> Path:
        """What the worker with that number wrote, in the order they were started."""
        return self.root / f"worker-{number}.log"

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.root.glob("worker-*.log")))

    def work(self, *kinds: str, timeout_s: float = 60.0) -> None:
        """Let a worker in this process do everything there is to do; its trainers are processes all the same."""
        worker = self.client.system.worker(frozenset(map(TaskKind, kinds)) or None)
        watchdog = threading.Timer(timeout_s, worker.stop)
        watchdog.start()
        worker.run(until_idle=True)
        watchdog.cancel()
        assert not worker.stopping.is_set(), f"still at work after {timeout_s} s"

    def submit(self, *overrides: str, lines: int = 60, first: int = 0, **wishes: Any) -> str:
        """Queue a run on `lines` lines; the same numbers are the same dataset."""
        file = a_jsonl(self.root / f"data-{first}-{lines}.jsonl", lines, first=first)
        profile = wishes.pop("profile", PROFILE)
        data = self.client.datasets.prepare(profile, [file])[0].id if wishes.get("dry_run") else file
        return self.client.runs.submit(profile, data, overrides=overrides, **wishes).id

    def state(self, run_id: str) -> str:
        return str(self.client.runs.get(run_id).state)

    def wait(self, run_id: str, *states: str, timeout_s: float = 30.0) -> str:
        """Until the run is in one of the states, or has ended; which state that is."""
        finished = {str(state) for state in RUN.finished}
        state = wait_for_state(self.client, run_id, *({*states} | finished), timeout_s=timeout_s)
        assert not states or state in states, f"{run_id} is {state}: {self.client.runs.get(run_id).reason}"
        return state

    def attempts(self, run_id: str, kind: str = "train") -> list[AttemptView]:
        return [attempt for attempt in self.client.runs.show(run_id).attempts if attempt.task == kind]

    def folder(self, run_id: str, attempt: AttemptView) -> Path:
        return self.client.workspace.runs_dir / run_id / attempt.id

    def spec(self, run_id: str, attempt: AttemptView) -> dict[str, Any]:
        """What the program of an attempt was told."""
        spec: dict[str, Any] = json.loads((self.folder(run_id, attempt) / "spec.json").read_bytes())
        return spec

    def program_events(self, run_id: str, attempt: AttemptView) -> list[dict[str, Any]]:
        """Whole lines only: the program may be writing."""
        path = self.folder(run_id, attempt) / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def steps(self, run_id: str, attempt: AttemptView) -> list[int]:
        """The steps that an attempt trained."""
        return [event["step"] for event in self.program_events(run_id, attempt) if event["type"] == "metrics"]

    def wait_for_step(self, run_id: str, step: int, attempt: int = 0, timeout_s: float = 30.0) -> AttemptView:
        """Until the training attempt with that index has made the step; the attempt."""

        def started() -> AttemptView | None:
            attempts = self.attempts(run_id)
            return attempts[attempt] if len(attempts) > attempt else None

        begun = wait_for(started, timeout_s, f"for attempt {attempt} of {run_id}: {self.logs()[-2000:]}")
        wait_for(lambda: step in self.steps(run_id, begun), timeout_s, f"for step {step} of {run_id}")
        return begun

    @property
    def database(self) -> Database:
        return self.client._session.database

    def rows(self, *tables_left_out: str) -> Rows:
        """Everything the store holds."""
        with self.database.read() as tx:
            return {
                table.name: [dict(row) for row in tx.all(sa.select(table).order_by(*table.primary_key.columns))]
                for table in tables.metadata.sorted_tables
                if table.name not in tables_left_out
            }

    def served(self, profile: str = PROFILE, folder: str | None = None) -> str | None:
        """The verified digest of what the directory target serves; None for the bare base."""
        current = self.root / (folder or f".tunesmith/live/{profile}") / "current"
        return verify_folder(current.resolve(strict=True)).digest if os.path.lexists(current) else None

    def adapter_folders(self) -> list[str]:
        """What lies in the workspace's adapters, half-made things included."""
        folder = self.client.workspace.adapters_dir
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def an_experience(self, dataset_id: str, key: str = "one") -> str:
        """An experience that the dataset has reserved; its id."""
        with self.database.write() as tx:
            messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
            profile = datasets.get(tx, dataset_id).profile
            experience_id, _ = experiences.add(tx, profile, key, messages, actor="user:test")
            experiences.reserve(tx, [experience_id], dataset_id, actor="user:test")
        return experience_id

    def experience(self, experience_id: str) -> experiences.Experience:
        with self.database.read() as tx:
            return experiences.get(tx, experience_id)

    def strays(self) -> list[int]:
        """Living processes of any attempt of this workspace."""
        return [pid for pid, _ in programs_below(self.client.workspace.runs_dir)]

    def end(self) -> None:
        """Kill whatever has this workspace as its place: workers, also those that run under something, and programs."""
        for process in all_processes():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/cwd").startswith(str(self.root)):
                    os.kill(process.pid, signal.SIGKILL)
        for worker in self.processes:
            worker.kill()  # what it runs under may have another place
            worker.wait()
        self.client.close()


def programs_below(runs_dir: Path) -> Iterator[tuple[int, str]]:
    """(pid, attempt id) of the living programs and shims that work in a workspace, found by their marker."""
    for process in all_processes():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            where = os.readlink(f"/proc/{process.pid}/cwd")
        except OSError:
            continue
        marks = [entry.partition(b"=")[2].decode() for entry in environ if entry.startswith(f"{MARKER}=".encode())]
        if marks and process.state not in "ZX" and where.startswith(str(runs_dir)):
            yield process.pid, marks[0]


def freeze_program(fleet: Fleet) -> None:
    """Stop the one trainer or evaluator that runs, not its shim. It must last (`eval_script: wait`)."""
    runs_dir = fleet.client.workspace.runs_dir

    def running() -> int | None:
        for pid, _ in programs_below(runs_dir):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                if b"shim.py" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    os.kill(wait_for(running, 30.0, "for a program to freeze"), signal.SIGSTOP)


def end_of_programs(fleet: Fleet, attempt_id: str, timeout_s: float = 20.0) -> float:
    """Wait until no process of an attempt is left; the wall time at which that was seen."""
    runs_dir = fleet.client.workspace.runs_dir
    wait_for(lambda: not any(mark == attempt_id for _, mark in programs_below(runs_dir)), timeout_s, "for programs")
    return time.time()


_SOAK = pytest.mark.soak
ON_SQLITE = pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=_SOAK)], indirect=True)
"""For stories in which SQL, locks and transactions are not the point: the other database is for `make soak`."""
ON_POSTGRES = pytest.mark.parametrize("store", ["postgres", pytest.param("sqlite", marks=_SOAK)], indirect=True)


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[MakeFleet]:
    """Makes a workspace with its fleet; `store` is the URL of a PostgreSQL database, else it is SQLite."""
    made: list[Fleet] = []

    def make(name: str = "one", *, store: str | None = None, **kwargs: Any) -> Fleet:
        settings = dict(kwargs.pop("settings", {}))
        if store is not None:
            settings["store"] = {"url": store}
        fleet = Fleet(a_workspace(tmp_path / name, settings=settings, **kwargs))
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet.end()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a fresh PostgreSQL database."""
    name = f"story_{next(_numbers)}"
    yield postgres.create(name, template="template_of_tests")
    postgres.drop(name)


@pytest.fixture(params=BOTH)
def store(request: pytest.FixtureRequest) -> str | None:
    """The URL of a fresh PostgreSQL database, and None for the workspace's own SQLite file."""
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else None
