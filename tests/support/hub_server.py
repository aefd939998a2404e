"""A model hub on loopback that speaks the wire format that `huggingface_hub` reads: listing, HEAD, redirects, ranges.

As on the real hub, the metadata of a gated model is public and only its files are refused; files of Git LFS are
redirected to another path, and carry their hash and size in headers of their own.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from support.json_server import Answered, JsonServer

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?\Z")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)\Z")
_CDN = re.compile(r"/cdn/([0-9a-f]{64})\Z")


@dataclass
class HubModel:
    """One model with one commit, named by its content and by branches."""

    files: dict[str, bytes]
    is_gated: bool = False
    token: str | None = None
    branches: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        listed = "".join(f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in sorted(self.files.items()))
        return hashlib.sha1(listed.encode()).hexdigest()


@dataclass
class Faults:
    """What the server does wrong on purpose."""

    status: int | None = None
    """Answers everything with it."""
    damaged: set[str] = field(default_factory=set)
    """Files whose bytes differ from the listing."""
    withheld: set[str] = field(default_factory=set)
    """Files that are forbidden, though they are listed."""


class HubServer(JsonServer):
    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, HubModel] = {}
        self.faults = Faults()

    def asked_for(self, name: str) -> int:
        """How often a file was downloaded."""
        data = {hashlib.sha256(m.files[name]).hexdigest() for m in self.models.values() if name in m.files}
        paths = [path for method, path, _ in self.calls if method == "GET"]
        return sum(path.endswith(f"/{name}") or path.rpartition("/")[2] in data for path in paths)

    def answer(self, method: str, path: str, body: Any, call: BaseHTTPRequestHandler) -> Any:
        path = unquote(urlsplit(path).path)
        if self.faults.status is not None:
            raise Answered(self.faults.status, {"error": "no"})
        if found := _API.match(path):
            return self._listing(found[1], found[2])
        if found := _RESOLVE.match(path):
            return self._file(found[1], found[2], found[3], call)
        if found := _CDN.match(path):
            return self._large(found[1], call)
        raise Answered(404, {"error": "not found"})

    def _model(self, name: str) -> HubModel:
        if name not in self.models:  # as the real hub answers to who has no token
            raise Answered(401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"})
        return self.models[name]

    def _listing(self, name: str, revision: str | None) -> Any:
        model = self._model(name)
        if revision not in (None, model.commit, *model.branches):
            error = f"Invalid rev id: {revision}"
            raise Answered(404, {"error": error}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": error})
        siblings = [_sibling(file, data) for file, data in model.files.items()]
        gated = "manual" if model.is_gated else False
        return {"id": name, "modelId": name, "sha": model.commit, "private": False, "gated": gated, "tags": [],
                "downloads": 1, "siblings": siblings}  # fmt: skip

    def _file(self, name: str, revision: str, file: str, call: BaseHTTPRequestHandler) -> Any:
        model = self._model(name)
        if model.is_gated and call.headers.get("Authorization") != f"Bearer {model.token}":
            status = 403 if call.headers.get("Authorization") else 401
            raise Answered(status, None, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        if file in self.faults.withheld:
            raise Answered(403, {"error": "no"})
        data = model.files[file]
        about = {"X-Repo-Commit": model.commit, "Accept-Ranges": "bytes"}
        if not _is_large(file):
            content = data + b" " if file in self.faults.damaged else data
            raise Answered(200, content, {**about, "ETag": f'"{_git_id(data)}"'})
        digest = hashlib.sha256(data).hexdigest()
        elsewhere = self.url.replace("127.0.0.1", "localhost")  # the real ones lie on another host, too
        linked = {
            "Location": f"{elsewhere}/cdn/{digest}",
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{digest}"',
        }
        raise Answered(302, b"", {**about, **linked})

    def _large(self, digest: str, call: BaseHTTPRequestHandler) -> Any:
        assert call.headers.get("Authorization") is None, "a token is for the hub alone"
        named = ((n, d) for m in self.models.values() for n, d in m.files.items())
        name, data = next((n, d) for n, d in named if hashlib.sha256(d).hexdigest() == digest)
        if name in self.faults.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        begin = int(found[1]) if (found := re.match(r"bytes=(\d+)-", call.headers.get("Range") or "")) else 0
        about = {"ETag": f'"{digest}"', "Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        raise Answered(206 if begin else 200, data[begin:], about)


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _git_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    about: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git_id(data)}
    if _is_large(name):
        about["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return about
