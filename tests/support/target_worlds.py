"""One small world per kind of target: who serves there, adapters of the profile `support`, and how it gets lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.engine import a_lively_base
from support.gateway import ServerProcess, a_served_workspace, make_live
from support.ollama_server import BASE, OllamaServer
from support.serving_bases import an_adapter, write_gguf
from support.vllm_server import VllmServer
from support.workspaces import wait_for
from tunesmith.deployment.targets.base import ServedAdapter, Target
from tunesmith.deployment.targets.registry import make_target
from tunesmith.models import queries as adapters
from tunesmith.programs.shim import read_process

PROFILE = "support"
SUPPORT = Path(__file__).parent


def _nothing() -> None:
    pass


def _nothing_of(adapter: ServedAdapter | None) -> None:
    pass


@dataclass
class World:
    """What the contract needs to know of one kind of target."""

    kind: str
    options: dict[str, Any]
    root: Path
    first: ServedAdapter
    second: ServedAdapter
    refused: ServedAdapter
    """Cannot be served there."""
    why: str
    """Part of the reason."""
    lose: Callable[[], None]
    """Whatever loses what is served: a restart, a kill, a removal."""
    mend: Callable[[], None] = _nothing
    """Whatever else must happen before it can be loaded again."""
    wanted: Callable[[ServedAdapter | None], None] = _nothing_of
    """Moves the pointer in the store, where a target follows it."""
    about: dict[str, Any] = field(default_factory=dict)

    def target(self) -> Target:
        """A fresh one each time: nothing of a target lives in memory."""
        return make_target(self.kind, self.options, root=self.root, profile=PROFILE)


@dataclass(frozen=True)
class Made:
    """Adapters that are costly to make, once for all worlds."""

    folder: Path
    first: ServedAdapter
    second: ServedAdapter
    scaled: ServedAdapter
    """rsLoRA."""
    wide: ServedAdapter
    """Of rank 32."""

    @classmethod
    def at(cls, folder: Path) -> Made:
        return cls(
            folder,
            an_adapter(folder, f"{PROFILE}@v1", seed=1),
            an_adapter(folder, f"{PROFILE}@v2", seed=2),
            an_adapter(folder, f"{PROFILE}@v8", seed=8, rslora=True),
            an_adapter(folder, f"{PROFILE}@v9", seed=9, rank=32),
        )

    def damaged(self, root: Path) -> ServedAdapter:
        """One that changed after it was published."""
        folder = root / f"{PROFILE}@v7"
        shutil.copytree(self.first.path, folder)
        (folder / "adapter_config.json").write_text("{}")
        return ServedAdapter(f"{PROFILE}@v7", folder, self.first.digest)


@cache
def shared_adapters(folder: Path) -> Made:
    """Made once for all test modules of a process; nothing changes them."""
    folder.mkdir()
    return Made.at(folder)


@contextmanager
def a_directory(root: Path, made: Made) -> Iterator[World]:
    def lose() -> None:
        current = (root / "live" / "current").resolve()
        (current / "adapter_model.safetensors").write_bytes(b"")

    yield World(
        "directory", {"path": "live"}, root, made.first, made.second, made.damaged(root), "not what the manifest", lose
    )


@contextmanager
def a_command(root: Path, made: Made) -> Iterator[World]:
    place = root / "program.json"

    def lose() -> None:
        place.write_text(json.dumps({**json.loads(place.read_text()), "held": {}}))

    options = {"program": [sys.executable, str(SUPPORT / "target_program.py"), str(place)], "timeout_s": 20}
    yield World("command", options, root, made.first, made.second, made.damaged(root), "not what the manifest", lose)


@contextmanager
def a_vllm(root: Path, made: Made) -> Iterator[World]:
    """Two replicas; one of them restarts."""
    with VllmServer() as one, VllmServer() as two:
        options = {"urls": [one.url, two.url], "timeout_s": 10}
        yield World("vllm", options, root, made.first, made.second, made.wide, "lora_rank: 32", two.restart,
                    about={"replicas": [one, two]})  # fmt: skip


@contextmanager
def an_ollama(root: Path, made: Made) -> Iterator[World]:
    with OllamaServer() as server:

        def lose() -> None:
            for name in [name for name in server.models if name != BASE]:
                del server.models[name]

        options = {"url": server.url, "model": BASE, "timeout_s": 10}
        yield World("ollama", options, root, made.first, made.second, made.scaled, "rslora", lose,
                    about={"server": server})  # fmt: skip


@contextmanager
def a_llamacpp(root: Path, made: Made, program: list[str] | None = None) -> Iterator[World]:
    """Processes that take llama-server's arguments; all of them are killed."""
    write_gguf(root / "base.gguf")
    start = program or [sys.executable, str(SUPPORT / "llama_server_program.py")]
    options = {"model": "base.gguf", "start": start, "timeout_s": 60}
    try:
        yield World("llamacpp", options, root, made.first, made.second, made.scaled, "rslora",
                    lambda: kill_processes(root))  # fmt: skip
    finally:
        kill_processes(root)


def llama_pids(root: Path) -> list[int]:
    """Of the processes that the state files know."""
    return [
        process["identity"]["pid"]
        for path in (root / ".tunesmith" / "targets" / PROFILE).glob("llamacpp-*.json")
        for process in json.loads(path.read_text()).get("processes", ())
        if process["identity"] is not None
    ]


def kill_processes(root: Path) -> None:
    """They are gone afterwards, with their sockets."""
    pids = llama_pids(root)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_for(lambda pid=pid: (found := read_process(pid)) is None or found.state in "ZX")


@contextmanager
def an_embedded(root: Path, made: Made) -> Iterator[World]:
    """A real `tunesmith serve`, killed and started again."""
    base = a_lively_base(root / "base")
    client = a_served_workspace(root / "work", base, num_versions=2)
    database = client.serving.session.database
    make_live(database, None)
    running = [ServerProcess(client.workspace.root)]

    def served(number: int) -> ServedAdapter:
        with database.read() as tx:
            found = adapters.find(tx, f"{PROFILE}@v{number}")
        return ServedAdapter(found.name, client.workspace.data_dir / found.path, found.digest)

    def lose() -> None:
        running[-1].end(signal.SIGKILL)

    def mend() -> None:
        running.append(ServerProcess(client.workspace.root))

    def wanted(adapter: ServedAdapter | None) -> None:
        make_live(database, None if adapter is None else int(adapter.name.partition("@v")[2]))

    try:
        yield World("embedded", {"timeout_s": 150}, client.workspace.root, served(1), served(2), made.damaged(root),
                    "not what the manifest", lose, mend, wanted)  # fmt: skip
    finally:
        running[-1].end(signal.SIGKILL)
        client.close()


WORLDS: dict[str, Callable[[Path, Made], Any]] = {
    "directory": a_directory,
    "command": a_command,
    "vllm": a_vllm,
    "ollama": an_ollama,
    "llamacpp": a_llamacpp,
    "embedded": an_embedded,
}
