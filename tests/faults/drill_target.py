"""Targets that an installed package brings, for drills: their process dies at a step, or their server is strict.

`install` puts them on an import path as a package would. `drill-directory` is the real directory target and
`drill-http` a client of `DrillServer`; both write down every step, and kill their process in front of the one that
DRILL_KILL_AT names, or suspend it in front of DRILL_STOP_AT.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.directory import DirectoryTarget
from tunesmith.deployment.targets.embedded import EmbeddedTarget
from tunesmith.evaluation.evaluators.sim import simulated_reading
from tunesmith.programs.readings import ProbeResult

KILL_AT = "DRILL_KILL_AT"
STOP_AT = "DRILL_STOP_AT"
STEPS = "DRILL_STEPS"
Prompts = Sequence[Sequence[Mapping[str, Any]]]
_num_steps = 0


def install(site: Path) -> None:
    """Make `site` hold this module and the metadata of a package that registers its targets."""
    about = site / "drill_target-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(__file__, site / "drill_target.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: drill-target\nVersion: 1.0\n")
    kinds = {"directory": "DrillDirectory", "http": "DrillHttp", "embedded": "DrillEmbedded"}
    lines = [f"drill-{kind} = drill_target:{name}\n" for kind, name in kinds.items()]
    (about / "entry_points.txt").write_text("".join(["[tunesmith.targets]\n", *lines]))


def step(name: str) -> None:
    """One more step of this process; it may be the one that it does not live to see."""
    global _num_steps  # noqa: PLW0603 - a process has one number of steps
    _num_steps += 1
    if STEPS in os.environ:
        with Path(os.environ[STEPS]).open("a") as sink:
            sink.write(f"{name}\n")
    if os.environ.get(KILL_AT) == str(_num_steps):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get(STOP_AT) == str(_num_steps):
        os.kill(os.getpid(), signal.SIGSTOP)
    if victim is not None:
        victim.steps.append(name)
        if len(victim.steps) == victim.dies_at:
            victim.process.kill()
            victim.process.wait()
            victim.and_then()


@dataclass
class Victim:
    """A server that is killed in front of the n-th step of this process."""

    process: subprocess.Popen[bytes]
    dies_at: int
    and_then: Callable[[], None]
    steps: list[str] = field(default_factory=list)


victim: Victim | None = None


class Stepping:
    """In front of a real target: every call is a step."""

    def refusal(self, adapter: ServedAdapter) -> str | None:
        step("refusal")
        return super().refusal(adapter)  # type: ignore[misc,no-any-return]

    def load(self, adapter: ServedAdapter) -> None:
        step("load")
        super().load(adapter)  # type: ignore[misc]

    def probe(self, adapter: ServedAdapter, prompts: Prompts, max_tokens: int) -> list[ProbeResult] | None:
        step("probe")
        return super().probe(adapter, prompts, max_tokens)  # type: ignore[misc,no-any-return]

    def flip(self, adapter: ServedAdapter | None) -> None:
        step("flip")
        super().flip(adapter)  # type: ignore[misc]

    def drain(self, name: str, timeout_s: float) -> None:
        step(f"drain {name}")
        super().drain(name, timeout_s)  # type: ignore[misc]

    def unload(self, name: str) -> None:
        step(f"unload {name}")
        super().unload(name)  # type: ignore[misc]

    def loaded(self) -> frozenset[str]:
        step("loaded")
        return super().loaded()  # type: ignore[misc,no-any-return]

    def observe(self) -> str | None:
        step("observe")
        return super().observe()  # type: ignore[misc,no-any-return]


class DrillDirectory(Stepping, DirectoryTarget):
    """The real one, step by step."""

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        step("flip")
        super().flip_in_order(adapter, order)


class DrillEmbedded(Stepping, EmbeddedTarget):
    """The real one; `victim` is the server that dies in front of a step, not this process."""


class DrillHttp:
    """A client of `DrillServer`."""

    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        self._url = str(options["url"])

    def refusal(self, adapter: ServedAdapter) -> str | None:
        step("refusal")
        return self._ask("refusal", name=adapter.name, digest=adapter.digest)["refusal"]  # type: ignore[no-any-return]

    def load(self, adapter: ServedAdapter) -> None:
        step("load")
        self._ask("load", name=adapter.name, digest=adapter.digest)

    def probe(self, adapter: ServedAdapter, prompts: Prompts, max_tokens: int) -> list[ProbeResult] | None:
        step("probe")
        said = self._ask("probe", name=adapter.name, prompts=[list(prompt) for prompt in prompts])
        return [ProbeResult.model_validate(reading) for reading in said["readings"]]

    def flip(self, adapter: ServedAdapter | None) -> None:
        step("flip")
        self._ask("flip", name=None if adapter is None else adapter.name)

    def drain(self, name: str, timeout_s: float) -> None:
        step(f"drain {name}")
        self._ask("drain", name=name)

    def unload(self, name: str) -> None:
        step(f"unload {name}")
        self._ask("unload", name=name)

    def loaded(self) -> frozenset[str]:
        step("loaded")
        return frozenset(self._ask("state")["loaded"])

    def observe(self) -> str | None:
        step("observe")
        return self._ask("state")["live"]  # type: ignore[no-any-return]

    def _ask(self, verb: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._url}/{verb}", json.dumps(body).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            with error:
                raise TargetError(f"{verb}: {error.read().decode()}") from None
        except OSError as error:
            raise TargetError(f"cannot be reached: {error}") from None


class DrillServer:
    """A strict server of adapters in memory: it refuses to flip to what it does not hold, or to unload what it serves.

    `seen` is everything that a request would have been answered by, after each change.
    """

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.alias: str | None = None
        self.answers_as: str | None = None
        """A digest that it answers with whatever is loaded, as a server with other weights would."""
        self.refuses: str | None = None
        self.seen: list[str | None] = []
        self.calls: list[str] = []
        self.busy: set[str] = set()
        self._lock = threading.Lock()

    @property
    def live(self) -> str | None:
        return None if self.alias is None else self.held[self.alias]

    def restart(self) -> None:
        """As a server of adapters in memory does: everything is gone."""
        with self._lock:
            self.held, self.alias = {}, None

    def answer(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.calls.append(verb if body.get("name") is None else f"{verb} {body['name']}")
            reply = self._answer(verb, body)
            self.seen.append(self.live)
            return reply

    def _answer(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("name")
        match verb:
            case "refusal":
                return {"refusal": self.refuses}
            case "load":
                if self.held.get(name, body["digest"]) != body["digest"]:
                    raise ValueError(f"{name} is held with another content")
                self.held[name] = body["digest"]
            case "probe":
                digest = self.answers_as or self.held[name]
                readings = [simulated_reading(digest, prompt) for prompt in body["prompts"]]
                return {"readings": [reading.model_dump(mode="json") for reading in readings]}
            case "flip":
                if name is not None and name not in self.held:
                    raise ValueError(f"{name} is not loaded")
                self.alias = name
            case "drain" if name in self.busy:
                raise ValueError(f"{name} still answers")
            case "unload":
                if name == self.alias:
                    raise ValueError(f"{name} is served")
                self.held.pop(name, None)
            case "state":
                return {"loaded": sorted(self.held), "live": self.live}
        return {}


@contextmanager
def serving(server: DrillServer) -> Iterator[str]:
    """The server on a free port; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, reply = 200, json.dumps(server.answer(self.path.strip("/"), body))
            except (ValueError, KeyError) as error:
                status, reply = 409, str(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(reply.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing is told about requests."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
