"""llama-server processes that a target starts itself: each with adapters it was given, none of which ever changes.

llama.cpp loads adapters only at start, so a new version is a new process beside the old one. What a process answers
with where nobody says (its default) is set on its command line and never moved: its cached prompts belong to it.
A process outlives whoever started it. The state file knows it by pid, start time and boot; one whose starter was killed
before that was written is found by its marker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.core.clock import boot_id
from tunesmith.core.environment import child_environment
from tunesmith.core.ids import new_id, new_token
from tunesmith.deployment.targets.base import TargetError
from tunesmith.deployment.targets.server import TargetServer
from tunesmith.programs.process_identity import (
    MARKER,
    ProcessIdentity,
    identify,
    is_alive,
    kill_below,
    processes_of_attempt,
)

_POLL_S = 0.05
_GRACE_S = 10.0
_SHOWN_LOG = 600
_LAUNCHER = (
    "import json, os, subprocess, sys\n"
    "told = json.load(sys.stdin)\n"
    "with open(told['log'], 'ab') as log:\n"
    "    child = subprocess.Popen(told['argv'], stdin=subprocess.DEVNULL, stdout=log, stderr=log,\n"
    "                             start_new_session=True, cwd=told['cwd'])\n"
    "print(child.pid, flush=True)\n"
    "os._exit(0)\n"
)
"""Starts the server and ends at once, so that it is nobody's child: no zombie, and no end with its starter."""


@dataclass(frozen=True)
class HeldAdapter:
    """An adapter in a process; its place in the list is the id by which llama.cpp knows it."""

    name: str
    digest: str
    gguf: str
    sha256: str
    is_gone: bool = False
    """Nobody may ask for it any more; the process still has it."""


@dataclass(frozen=True)
class LlamaProcess:
    """One llama-server on a port of this machine."""

    id: str
    port: int
    key: str
    log: str
    adapters: tuple[HeldAdapter, ...] = ()
    default: str | None = None
    """Which of them answers where nobody says; None is the bare base."""
    identity: ProcessIdentity | None = None
    """None between the decision to start it and its start."""

    @property
    def is_alive(self) -> bool:
        return self.identity is not None and is_alive(self.identity)

    def place_of(self, name: str) -> int | None:
        return next((at for at, held in enumerate(self.adapters) if held.name == name and not held.is_gone), None)

    def http(self, timeout_s: float) -> TargetServer:
        return TargetServer(f"http://127.0.0.1:{self.port}", timeout_s, key=self.key)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> LlamaProcess:
        identity = raw.get("identity")
        return cls(
            id=str(raw["id"]),
            port=int(raw["port"]),
            key=str(raw["key"]),
            log=str(raw["log"]),
            adapters=tuple(HeldAdapter(**held) for held in raw["adapters"]),
            default=raw["default"],
            identity=None if identity is None else ProcessIdentity(**identity),
        )


def planned(adapters: Sequence[HeldAdapter], default: str | None, folder: Path) -> LlamaProcess:
    """A process that is yet to be started; written down first, so that it is found whatever happens then."""
    name = new_id("ls")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return LlamaProcess(name, port, new_token(), str(folder / f"{name}.log"), tuple(adapters), default)


def start(process: LlamaProcess, program: Sequence[str], model: Path, cwd: Path) -> LlamaProcess:
    """Start it; it is not ready yet. The key goes by the environment: a command line is for everyone to read."""
    argv = [*program, "--model", str(model), "--host", "127.0.0.1", "--port", str(process.port)]
    argv += ["--cache-ram", "0"]  # its cache of prompts does not tell adapters apart
    argv += ["--slots"]
    for held in process.adapters:
        argv += ["--lora-scaled", f"{held.gguf}:{1 if held.name == process.default else 0}"]
    told = json.dumps({"argv": argv, "log": process.log, "cwd": str(cwd)})
    environ = {**child_environment(os.environ), MARKER: process.id, "LLAMA_API_KEY": process.key}
    try:
        Path(process.log).touch(mode=0o600)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER],
            input=told, capture_output=True, text=True, env=environ, timeout=_GRACE_S, check=True,
        )  # fmt: skip
        pid = int(done.stdout)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise TargetError(
            f"{program[0]} cannot be started: {said[:200]}; name a llama-server in options.start"
        ) from None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise TargetError(f"{program[0]} cannot be started ({type(error).__name__})") from None
    return replace(process, identity=identify(pid, process.id))


def wait_until_ready(process: LlamaProcess, timeout_s: float) -> None:
    """Until it answers; TargetError with the end of its log where it dies or is too slow."""
    deadline = time.monotonic() + timeout_s
    asked = process.http(min(5.0, timeout_s))
    while time.monotonic() < deadline:
        if not process.is_alive:
            raise TargetError(f"llama-server ended while it was starting: {_end_of(process.log)}")
        with contextlib.suppress(TargetError):
            if asked.ask("GET", "/health").status == 200:
                return
        time.sleep(_POLL_S)
    raise TargetError(f"llama-server was not ready after {timeout_s:g} s: {_end_of(process.log)}")


def end(process: LlamaProcess) -> None:
    """End it and whatever carries its marker; first politely."""
    identity = process.identity or ProcessIdentity(-1, 1, boot_id(), process.id)
    if identity.boot_id != boot_id():
        return
    deadline = time.monotonic() + _GRACE_S
    if process.is_alive:
        with contextlib.suppress(OSError):
            os.kill(identity.pid, signal.SIGTERM)
            os.kill(identity.pid, signal.SIGCONT)  # one that is stopped hears nothing else
        while process.is_alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if process.is_alive or processes_of_attempt(identity):
        kill_below(identity)
    Path(process.log).unlink(missing_ok=True)


def is_busy(process: LlamaProcess, name: str | None, timeout_s: float) -> bool:
    """Whether it is answering now; with a name, from that version."""
    slots = process.http(timeout_s).get("/slots")
    busy = [slot for slot in slots if isinstance(slot, dict) and slot.get("is_processing")]
    if name is None:
        return bool(busy)
    place = process.place_of(name)
    return any(_asked_of(slot, process, place) for slot in busy)


def _asked_of(slot: dict[str, Any], process: LlamaProcess, place: int | None) -> bool:
    lora = (slot.get("params") or {}).get("lora") or []
    if not lora:  # nobody said, so its default answers
        return place is not None and process.default == process.adapters[place].name
    return any(entry.get("id") == place and entry.get("scale") for entry in lora)


def _end_of(log: str) -> str:
    try:
        text = Path(log).read_text(errors="replace")[-_SHOWN_LOG:]
    except OSError:
        return "it left no log"
    shown = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(shown.split()) or "it said nothing"
