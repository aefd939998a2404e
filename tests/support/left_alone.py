"""`examples/support_triage` left alone: real server, real worker, simulated people; whatever is killed starts again.

`LeftAlone` runs the processes as a service manager would, lets people use the desk, and measures quality on fixed
requests that nobody ever sends to be learnt. `left_alone_faults.py` kills, `left_alone_checks.py` looks at the store.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from openai import OpenAIError

from support.workspaces import AnyProcess, cli, start_command, wait_for
from tunesmith.client import Client
from tunesmith.core.errors import StoreError
from tunesmith.orchestration.rounds.history import Round
from tunesmith.programs.shim import all_processes
from tunesmith.runs.rules.run import RUN

EXAMPLE = Path(__file__).parents[2] / "examples" / "support_triage"
sys.path.insert(0, str(EXAMPLE))

import desk  # noqa: E402
import users  # noqa: E402
from desk import PROFILE, Desk, Ticket  # noqa: E402

__all__ = ["EXAMPLE", "NUM_USERS", "PROFILE", "TINY", "LeftAlone", "Outage", "desk", "merged", "the_fixed_set", "users"]

NUM_USERS = 3
Request = tuple[str, str]
"""A message, and its right label."""
TINY: dict[str, Any] = {
    "recipe": {"lr": 2e-3, "epochs": 10},
    "worker": {"lease_s": 6.0, "heartbeat_s": 0.5, "sweep_s": 0.3, "poll_s": 0.05, "grace_s": 1.0, "triggers_s": 0.5},
    "campaign": {"rejection_cooldown_h": 0},
    "watch": {"for_s": 0.5, "interval_s": 0.1, "max_failures": 300},
    "serve": {"device": "cpu", "follow_s": 0.1},
}
"""Over the example's settings, for the demo's quick base: it needs larger steps, and a drill has no patience."""


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of `changes` laid over those of `settings`, key by key."""
    return {**settings, **{name: {**settings.get(name, {}), **values} for name, values in changes.items()}}


def the_fixed_set(num_each: int, seed: int = 2026) -> list[Request]:
    """Requests about every queue, also those that come up later; nobody ever sends them to be learnt."""
    rng = random.Random(seed)
    return [users.a_request(rng, queue) for queue in users.NEEDS for _ in range(num_each)]


@dataclass
class Outage:
    """From a kill to the first answer after it; `what` is server or store."""

    what: str
    begun: float
    ended: float | None = None


@dataclass
class Failure:
    begun: float
    ended: float
    error: str


@dataclass
class WatchedDesk(Desk):
    """The example's desk, with a note of everything that was acknowledged, and of everything that failed."""

    server: str
    corrections: dict[str, str] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    num_answers: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.server)

    def route(self, message: str, *, learn: bool = True, model: str = PROFILE) -> Ticket:
        with self._noted():
            ticket = super().route(message, learn=learn, model=model)
        self.num_answers += 1
        return ticket

    def confirm(self, ticket: Ticket) -> None:
        with self._noted():
            super().confirm(ticket)
        self.confirmed.add(ticket.id)

    def correct(self, ticket: Ticket, label: str) -> None:
        with self._noted():
            super().correct(ticket, label)
        self.corrections[ticket.id] = label

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        except OpenAIError as error:
            self.failures.append(Failure(begun, time.monotonic(), f"{type(error).__name__}: {error}"))
            raise


class Service:
    """A command that is started again whenever it ends, until `close`."""

    def __init__(self, root: Path, name: str, *words: str, real: bool = False) -> None:
        self.root, self.name, self._words, self._real = root, name, words, real
        self.num_starts = 0
        self._stop = threading.Event()
        self.process = self._start()
        self._thread = threading.Thread(target=self._keep, name=f"keeps {name}", daemon=True)
        self._thread.start()

    @property
    def log(self) -> Path:
        return self.root / f"{self.name}.log"

    def _start(self) -> AnyProcess:
        self.num_starts += 1
        env = {"OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as sink:
            return start_command([self.name, *self._words], cwd=self.root, env=env, sink=sink, real=self._real)

    def _keep(self) -> None:
        while not self._stop.wait(0.2):
            if self.process.poll() is not None:
                self.process = self._start()

    def close(self, timeout_s: float = 60.0) -> int:
        """TERM, as a service manager does it; its exit code."""
        self._stop.set()
        self._thread.join()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


class LeftAlone:
    """The application of the example, under way."""

    def __init__(
        self,
        root: Path,
        base: Path,
        *,
        settings: Mapping[str, Any] = TINY,
        store: str | None = None,
        fixed: Sequence[Request] = (),
        real: bool = False,
    ) -> None:
        self.root, self.fixed = root, list(fixed)
        self.url = f"http://127.0.0.1:{_a_free_port()}"
        _write_workspace(root, base, settings, int(self.url.rpartition(":")[2]), store)
        self.client = Client(root, actor="user:test", environ={})
        self.desk = WatchedDesk(self.url)
        self.outages: list[Outage] = []
        self.answers: dict[str, dict[str, str]] = {}
        """By version: what it answers to each fixed request."""
        self.server = Service(root, "serve", real=real)
        self.wait_for_server()
        self.start = self.quality()
        self.worker = Service(root, "worker", real=real)

    # --- people ---

    def a_day(self, day: int, num: int) -> tuple[int, int]:
        """So many requests by several people at once; how many answers were right, how many requests failed."""
        known = {message for message, _ in self.fixed}
        requests = [request for request in users.requests_of(day, num) if request[0] not in known]
        parts = [requests[number::NUM_USERS] for number in range(NUM_USERS)]
        with ThreadPoolExecutor(NUM_USERS) as pool:
            rngs = [random.Random(f"{day} {number}") for number in range(NUM_USERS)]
            told = list(pool.map(users.use, [self.desk] * NUM_USERS, parts, rngs))
        return sum(right for right, _ in told), sum(failed for _, failed in told)

    # --- what is live ---

    def wait_for_server(self, timeout_s: float = 120.0) -> None:
        def answers() -> bool:
            with contextlib.suppress(httpx2.HTTPError):
                return httpx2.get(f"{self.url}/v1/models", timeout=10.0).status_code == 200
            return False

        wait_for(answers, timeout_s, f"for the server: {_end_of(self.root / 'serve.log')}")

    def quality(self) -> tuple[str, float]:
        """What is live now, and its share of right answers to the fixed requests. A version never changes its mind."""
        for _ in range(20):
            version = self._ask(self.fixed[0]).version
            known = self.answers.get(version)
            asked = self.fixed if known is None else self.fixed[:: max(1, len(self.fixed) // 6)]
            with ThreadPoolExecutor(8) as pool:
                tickets = list(pool.map(self._ask, asked))
            if {ticket.version for ticket in tickets} != {version}:
                continue  # another one went live meanwhile
            said = {ticket.message: ticket.label for ticket in tickets}
            if known is None:
                known = self.answers.setdefault(version, said)
            assert {message: known[message] for message in said} == said, f"{version} answers otherwise than before"
            return version, sum(known[message] == label for message, label in self.fixed) / len(self.fixed)
        raise AssertionError("what is live changes all the time")

    def measure(self, version: str) -> float:
        """The share of right answers of a version that is live, or was."""
        if version not in self.answers:
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(Desk.route, self.desk, each, learn=False, model=version) for each, _ in self.fixed]
            self.answers[version] = {ticket.message: ticket.label for ticket in (each.result() for each in asked)}
        known = self.answers[version]
        return sum(known[message] == label for message, label in self.fixed) / len(self.fixed)

    def _ask(self, request: Request) -> Ticket:
        return wait_for(lambda: self._asked(request[0]), 120.0, "for an answer")

    def _asked(self, message: str) -> Ticket | None:
        """Not through `self.desk`: what is asked to measure is no answer to anybody."""
        with contextlib.suppress(OpenAIError):
            return Desk.route(self.desk, message, learn=False)
        return None

    # --- rounds ---

    def rounds(self) -> list[Round]:
        """Oldest first; those that opened by themselves."""
        (campaign,) = self.client.campaigns.list(PROFILE)
        return [each for each in reversed(self.client.campaigns.rounds(campaign.id)) if each.is_automatic]

    def wait_for_rounds(self, num: int, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> list[Round]:
        """Until so many have ended, and none is under way."""

        def ended() -> list[Round] | None:
            meanwhile()
            try:
                found = self.rounds()
            except StoreError:  # it was just killed
                return None
            return found if len(found) >= num and all(each.state in RUN.finished for each in found) else None

        try:
            return wait_for(ended, timeout_s)
        except AssertionError as error:
            told = [(each.run_id, each.state, each.reason) for each in self.rounds()]
            raise AssertionError(f"{error} for round {num} of {told}; {self.why_not()}") from None

    def why_not(self) -> str:
        (campaign,) = self.client.campaigns.list(PROFILE)
        return "; ".join(self.client.campaigns.next_round(campaign.id).status.decision.why_not)

    # --- the end ---

    def close(self) -> list[str]:
        """End worker and server as a service manager does; what is left running in the workspace afterwards."""
        codes = [self.worker.close(), self.server.close()]
        assert codes == [0, 0], f"worker and server ended with {codes}: {_end_of(self.worker.log)}"
        self.client.close()
        return self.left()

    def left(self) -> list[str]:
        found = []
        for process in all_processes():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/cwd").startswith(str(self.root)):
                    line = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"{process.pid} {line}")
        return found

    def kill_all(self) -> None:
        """For a test that failed."""
        for service in (self.worker, self.server):
            service._stop.set()
            service._thread.join()
        for line in self.left():
            with contextlib.suppress(OSError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def _write_workspace(root: Path, base: Path, changes: Mapping[str, Any], port: int, store: str | None) -> None:
    """As the example's README says; the campaign is created in the store that the settings name."""
    words = ("init", str(root), "--base", str(base), "--task", PROFILE, "--role", "classifier")
    made = cli(*words, *(() if store is None else ("--no-campaign",)), cwd=root.parent)
    assert made.code == 0, made.err
    settings = merged(yaml.safe_load((EXAMPLE / "settings.yaml").read_text()), changes)
    settings = merged(settings, {"serve": {"port": port}} | ({} if store is None else {"store": {"url": store}}))
    (root / "tunesmith.yaml").write_text(yaml.safe_dump(settings))
    if store is not None:
        made = cli("campaign", "create", PROFILE, cwd=root)
        assert made.code == 0, made.err


def _a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""
