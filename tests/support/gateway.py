"""Builders for tests of the gateway: a workspace with a tiny base and real adapters, and a real server process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from support import tables
from support.engine import an_adapter
from support.rows import a_run, force
from support.workspaces import a_profile, an_empty_workspace, start_command, wait_for, write_settings
from tunesmith.client import Client
from tunesmith.deployment import queries as deployments
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.base_model import base_digest
from tunesmith.runs.queries import profile_locks
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Database

PROFILE = "support"
CHAT: dict[str, Any] = {"model": PROFILE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40,
                        "temperature": 0}  # fmt: skip
SERVE: dict[str, Any] = {"port": 0, "follow_s": 0.1, "device": "cpu", "max_tokens": 64, "min_residency_s": 0.0}
"""Settings of a drill."""


def a_served_workspace(
    folder: Path, base: Path, *, serve: Mapping[str, Any] | None = None, num_versions: int = 3, **settings: Any
) -> Client:
    """Profile `support` on the tiny base with versions 1 to n of random adapters; the first is live."""
    an_empty_workspace(folder)
    shutil.copytree(base, folder / "models" / "tiny")
    write_settings(folder, {**settings, "serve": {**SERVE, **(serve or {})}})
    capture = {"finished_only": False}
    a_profile(folder, PROFILE, recipe={"max_length": 256}, experience={"capture": capture})
    client = Client(folder, actor="user:test", environ={})
    for number in range(1, num_versions + 1):
        a_version(client, number, base)
    if num_versions:
        make_live(client.serving.session.database, 1)
    return client


def a_version(client: Client, number: int, base: Path, profile: str = PROFILE) -> adapters.Adapter:
    """A candidate in the store, with weights of its own."""
    data = client.workspace.data_dir
    path = f"adapters/{profile}-{number}"
    (data / "adapters").mkdir(exist_ok=True)
    made = an_adapter(base, data / path, seed=number, name=f"{profile}@v{number}")
    with client.serving.session.database.write() as tx:
        run = a_run(tx, RunState.COMPLETED, profile=profile)
        locked = profile_locks.lock_of(tx, profile)
        assert locked is not None
        facts = locked.model_copy(update={"base_digest": base_digest(base)})  # as the check of a real run does
        profile_locks.lock(tx, profile, facts, actor="user:test")
        return adapters.register(
            tx,
            profile,
            run_id=run.id,
            path=path,
            digest=made.digest,
            base_digest=base_digest(base),
            metrics={},
            actor="user:test",
        )


def make_live(database: Database, number: int | None, profile: str = PROFILE) -> None:
    """Flip without a deployment: what the server has to follow."""
    with database.write() as tx:
        live = adapters.live(tx, profile)
        wanted = None if number is None else adapters.find(tx, f"{profile}@v{number}")
        if live is not None:
            force(tx, tables.adapters, live.id, state=AdapterState.SUPERSEDED)
        if wanted is not None:
            force(tx, tables.adapters, wanted.id, state=AdapterState.LIVE)
        deployments._want(tx, profile, wanted and wanted.id, live and live.id, [], "user:test")


class ServerProcess:
    """A `tunesmith serve` in a process of its own."""

    def __init__(self, root: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.log = root / "serve.log"
        environ = {"OMP_NUM_THREADS": "1", **(env or {})}
        with self.log.open("ab") as sink:
            self.process = start_command(["serve", *words], cwd=root, env=environ, sink=sink)
        about = wait_for(self._about, 120.0, f"for the server: {self.log.read_text()}")
        self.url: str = about["url"]
        self.token: str = about["token"]
        self.id: str = about["id"]

    def _about(self) -> dict[str, Any] | None:
        assert self.process.poll() is None, self.log.read_text()
        for path in (self.root / ".tunesmith" / "serve").glob("*.json"):
            about: dict[str, Any] = json.loads(path.read_text())
            try:
                head = {"Authorization": f"Bearer {about['token']}"}
                httpx2.get(f"{about['url']}/healthz", headers=head, verify=False)
            except httpx2.HTTPError:
                return None
            return about
        return None

    @cached_property
    def api(self) -> OpenAI:
        return self.openai()

    def openai(self, **changes: Any) -> OpenAI:
        said: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": 120.0, **changes}
        return OpenAI(base_url=f"{self.url}/v1", **said)

    def http(self, **changes: Any) -> httpx2.Client:
        # without certificates, which nobody asks for here: reading them takes 25 ms
        return httpx2.Client(base_url=self.url, **{"timeout": 120.0, "verify": False, **changes})

    def control(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self.http(headers={"Authorization": f"Bearer {self.token}"}) as http:
            answer = http.get(path) if body is None else http.post(path, json=dict(body))
            assert answer.status_code == 200, answer.text
            return answer.json()

    def health(self) -> dict[str, Any]:
        return dict(self.control("/healthz"))

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextmanager
def a_server(root: Path, *words: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    server = ServerProcess(root, *words, env=env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def warm(server: ServerProcess, client: Client) -> None:
    """Until its engine runs."""
    adapter = client.adapters.show("support@v1")
    about = {"profile": PROFILE, "name": adapter.name, "path": str(adapter.path), "digest": adapter.digest}
    server.control("/control/load", about)


def engine_of(server: ServerProcess) -> int:
    return int(re.findall(r"engine_started pid=(\d+)", server.log.read_text())[-1])


@contextmanager
def frozen_engine(server: ServerProcess) -> Iterator[int]:
    """Nothing is written meanwhile."""
    pid = engine_of(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def in_background(action: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    """What it returned or raised is in the list when the thread has ended."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(action(*args))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def ask(server: ServerProcess, **wishes: Any) -> Any:
    return server.api.chat.completions.create(**{**CHAT, **wishes})


def num_in_use(server: ServerProcess) -> int:
    return sum(server.health()["in_use"].values())


def memory_of(server: ServerProcess) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096
