"""The `embedded` target: the engine inside `tunesmith serve`, asked over the control routes of a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunesmith.core.http import Reply
from tunesmith.deployment.targets.adapter_files import folder_refusal
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.options import TargetOptions, read_options
from tunesmith.deployment.targets.server import TargetServer
from tunesmith.profiles.workspace import is_this_one
from tunesmith.programs.process_identity import ProcessIdentity, is_alive
from tunesmith.programs.readings import ProbeResult

_SLACK_S = 5.0


class EmbeddedOptions(TargetOptions):
    """Nothing of its own: the server is found by its file in the workspace."""


class EmbeddedTarget:
    """Every server of this workspace that runs on this machine."""

    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        self._options = read_options(EmbeddedOptions, "embedded", options)
        self._root = root.resolve()
        self._folder = self._root / ".tunesmith" / "serve"
        self._profile = profile

    def refusal(self, adapter: ServedAdapter) -> str | None:
        """A trial is a load: it changes nothing that is served."""
        known = folder_refusal(adapter, "embedded", {})
        if known is not None:
            return known
        for server in self._servers():
            reply = server.ask("POST", "/control/load", self._about(adapter))
            if reply.status in (400, 404, 409, 422):
                return f"it cannot be loaded: {reply.error_message}"
            _need_good(server, reply)
        return None

    def load(self, adapter: ServedAdapter) -> None:
        for server in self._servers():
            _need_good(server, server.ask("POST", "/control/load", self._about(adapter)))

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        body = {
            "profile": self._profile,
            "name": adapter.name,
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
        }
        server = self._servers()[0]
        said = server.post("/control/probe", body)
        try:
            return [ProbeResult.model_validate(reading) for reading in said["readings"]]
        except (KeyError, TypeError, ValidationError) as error:
            raise TargetError(f"{server.url}: its readings cannot be read ({type(error).__name__})") from None

    def flip(self, adapter: ServedAdapter | None) -> None:
        """The store says what is live; a server that looks at it now must come to the same."""
        for server in self._servers():
            found = _digest(server, server.post("/control/flip", {"profile": self._profile}).get("live"))
            if found != (None if adapter is None else adapter.digest):
                raise TargetError(f"{server.url} took another version live than was asked for; it follows the store")

    def drain(self, name: str, timeout_s: float) -> None:
        for server in self._servers(timeout_s + _SLACK_S):
            _need_good(server, server.ask("POST", "/control/drain", {"name": name, "timeout_s": timeout_s}))

    def unload(self, name: str) -> None:
        for server in self._servers():
            _need_good(server, server.ask("POST", "/control/unload", {"name": name}))

    def loaded(self) -> frozenset[str]:
        names = {str(name) for server in self._servers() for name in server.get("/control/state").get("loaded", ())}
        return frozenset(name for name in names if name.startswith(f"{self._profile}@"))

    def observe(self) -> str | None:
        """What the profile's name means at every server; they must agree."""
        found = set()
        for server in self._servers():
            digests = server.get("/control/state").get("digests")
            if not isinstance(digests, dict) or self._profile not in digests:
                raise TargetError(f"{server.url} knows no profile {self._profile}; look at its log")
            found.add(digests[self._profile])
        if len(found) > 1:
            raise TargetError(f"the servers of this workspace serve different versions of {self._profile}")
        digest = found.pop()
        return None if digest is None else str(digest)

    def _about(self, adapter: ServedAdapter) -> dict[str, str]:
        return {
            "profile": self._profile,
            "name": adapter.name,
            "path": str(adapter.path),
            "digest": adapter.digest,
        }

    def _servers(self, timeout_s: float | None = None) -> list[TargetServer]:
        found = [
            TargetServer(str(about["url"]).rstrip("/"), timeout_s or self._options.timeout_s, key=str(about["token"]))
            for about in (_read(path, self._root) for path in sorted(self._folder.glob("*.json")))
            if about is not None
        ]
        if not found:
            raise TargetError("no server of this workspace runs on this machine; start it with: tunesmith serve")
        return found


def _read(path: Path, root: Path) -> dict[str, Any] | None:
    """What a server wrote about itself; None where its process is gone or the file is not one of this workspace's."""
    try:
        about = json.loads(path.read_bytes())
        identity = about["process"]
        process = ProcessIdentity.from_json(identity if isinstance(identity, str) else json.dumps(identity))
        is_ours = not process.place or is_this_one(process.place, root)
        return about if is_ours and is_alive(process) and {"url", "token"} <= set(about) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _need_good(server: TargetServer, reply: Reply) -> None:
    if not reply.is_ok:
        raise TargetError(f"{server.url} answered {reply.status}: {reply.error_message}")


def _digest(server: TargetServer, live: Any) -> str | None:
    if live is None:
        return None
    if not isinstance(live, dict) or not isinstance(live.get("digest"), str):
        raise TargetError(f"{server.url}: what it says is live cannot be read")
    return str(live["digest"])
