"""A workspace that is served and trained on one machine, for stories of the device between the two."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletion

from support.engine import an_adapter
from support.fleet import Fleet, programs_below
from support.gateway import PROFILE, SERVE, ServerProcess, a_served_workspace, make_live
from support.rows import a_run
from support.workspaces import wait_for
from tunesmith.models import queries as adapters
from tunesmith.profiles.base_model import base_digest
from tunesmith.programs.device.queries import hand_overs, servers
from tunesmith.programs.shim import all_processes
from tunesmith.runs.rules.run import RunState
from tunesmith.store import events

HOST = socket.gethostname()
SHARED: dict[str, Any] = {"shares_device": "always", "unused_timeout_s": 1.5, "drain_s": 1.0}
SERVED = {PROFILE: "support@v1"}


class World:
    """A workspace that is served and trained on one machine."""

    def __init__(
        self, folder: Path, base: Path, *, store: str | None = None, device: str = "cpu", **policy: Any
    ) -> None:
        serve = {**SERVE, "timeout_s": 60.0, "device": device, "hand_over": {**SHARED, **policy}}
        more = {} if store is None else {"store": {"url": store}}
        self.fleet = Fleet(a_served_workspace(folder / "ws", base, serve=serve, num_versions=0, **more))
        self._make_a_version(base)
        self.server = ServerProcess(self.fleet.root)

    def submit(self, *overrides: str) -> str:
        return self.fleet.submit("deploy.when=never", "recipe.max_length=64", *overrides)

    def _make_a_version(self, base: Path) -> None:
        """A live adapter beside a profile that is locked to its real base, so that runs can be submitted."""
        client = self.fleet.client
        first = self.submit()
        client.runs.cancel(first)
        made = an_adapter(base, client.workspace.adapters_dir / "one", name="support@v1")
        with self.fleet.database.write() as tx:
            run = a_run(tx, RunState.COMPLETED, dataset_id=client.runs.get(first).dataset_id)
            adapters.register(
                tx, PROFILE, run_id=run.id, path="adapters/one", digest=made.digest, base_digest=base_digest(base),
                metrics={}, actor="user:test",
            )  # fmt: skip
        make_live(self.fleet.database, 1)

    def state(self) -> str:
        return str(self.server.health()["state"])

    def until(self, state: str, timeout_s: float = 20.0) -> None:
        wait_for(lambda: self.state() == state, timeout_s, f"for {state}: {self.server.log.read_text()[-2000:]}")

    def ask(self) -> ChatCompletion:
        talk: list[Any] = [{"role": "user", "content": "hello"}]
        with self.server.openai(timeout=60.0) as api:
            return api.chat.completions.create(model=PROFILE, messages=talk, max_tokens=4)

    def engines(self) -> list[int]:
        """Living engine processes of the server."""
        found = []
        for process in all_processes():
            if process.parent == self.server.process.pid and process.state not in "ZX":
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                found += [process.pid] if b"tunesmith.serving.engine" in command else []
        return found

    def trainers(self) -> list[int]:
        return [pid for pid, _ in programs_below(self.fleet.client.workspace.runs_dir)]

    def is_back(self) -> None:
        """Serving, with the version that is live, and both the server and the store say so."""
        self.until("serving")
        assert self.server.health()["serving"] == SERVED

        def told() -> bool:
            with self.fleet.database.read() as tx:
                return [(s.state, s.serving) for s in servers.alive(tx)] == [("serving", SERVED)]

        wait_for(told, 10.0, "for the store to know")
        with self.fleet.database.read() as tx:
            assert hand_overs.open_on(tx, HOST) == []

    def steps_aside(self) -> int:
        with self.fleet.database.read() as tx:
            told = events.of_entity(tx, "server", self.server.id)
        return sum(event.new_state == "stepping_aside" for event in told)

    def restart(self) -> None:
        """Kill the server, if it still lives, and start another."""
        self.server.process.kill()
        self.server.process.wait()
        self.server = ServerProcess(self.fleet.root)

    def end(self) -> None:
        self.server.end(signal.SIGKILL)
        self.fleet.end()
