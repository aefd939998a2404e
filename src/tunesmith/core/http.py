"""One HTTP server and how we call it: bounded in time and size, no redirects, and a key that appears nowhere."""

from __future__ import annotations

import ipaddress
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from tunesmith.core.errors import TunesmithError

if TYPE_CHECKING:
    import httpx2

MAX_BYTES = 16 << 20
_CONNECT_S = 5.0
_MAX_SHOWN = 300
_CHUNK = 1 << 20


class HttpFailed(TunesmithError):
    """The server cannot be reached, is too slow, says too much, or says no."""

    code = "http"


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def error_message(self) -> str:
        """What the server says is wrong: cut, in one line, printable."""
        said = self.json
        error = said.get("error", said.get("detail")) if isinstance(said, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        raw = self.body[: 2 * _MAX_SHOWN].decode(errors="replace") if text is None else str(text)
        plain = " ".join(raw.split())
        shown = "".join(char if char.isprintable() else "?" for char in plain)
        return shown[:_MAX_SHOWN] + ("…" if len(shown) > _MAX_SHOWN else "")


@dataclass(frozen=True)
class Http:
    """One server. Whatever goes wrong is raised as `failed`, so that each package hears its own error."""

    failed: ClassVar[type[TunesmithError]] = HttpFailed
    url: str
    timeout_s: float
    key_env: str | None = None
    """Environment variable with its key."""
    key: str | None = field(default=None, repr=False)
    """Instead: the key of a server that we started ourselves."""

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every request; raises `failed` where the key is not set here."""
        key = self.key
        if self.key_env is not None:
            key = os.environ.get(self.key_env, "").strip()
            if not key:
                raise self.failed(f"the key of {self.url} is not set: put it into the variable {self.key_env}")
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, body: Any = None, *, file: Path | None = None) -> Reply:
        """Call it once; raises `failed` where it cannot be reached, is too slow or says too much."""
        import httpx2

        headers = {**self.headers, "Accept-Encoding": "identity"}
        content: bytes | Iterator[bytes] | None = None
        if file is not None:
            content = _chunks(file)
            headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(file.stat().st_size)}
        elif body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        timeout = httpx2.Timeout(self.timeout_s, connect=min(_CONNECT_S, self.timeout_s))
        try:
            with (
                httpx2.Client(timeout=timeout, follow_redirects=False, trust_env=not is_here(self.url)) as client,
                client.stream(method, self.url + path, content=content, headers=headers) as response,
            ):
                reply = Reply(response.status_code, self._bounded(response))
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError):
            raise self.failed(f"{self.url} cannot be reached; is the server running?") from None
        except httpx2.TimeoutException:
            raise self.failed(f"{self.url}{path}: no answer within {self.timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self.failed(f"{self.url}{path}: the connection broke off ({type(error).__name__})") from None
        if reply.status in (401, 403):
            raise self.failed(f"{self.url} refuses the key ({reply.status}); set options.key_env and that variable")
        return reply

    def _bounded(self, response: httpx2.Response) -> bytes:
        """The body; one that comes in drops is as slow as one that does not come."""
        chunks, size, deadline = [], 0, time.monotonic() + self.timeout_s
        for chunk in response.iter_raw():
            size += len(chunk)
            if size > MAX_BYTES:
                raise self.failed(f"{self.url}: the answer has more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise self.failed(f"{self.url}: the answer was not whole after {self.timeout_s:g} s")
            chunks.append(chunk)
        return b"".join(chunks)

    def get(self, path: str) -> Any:
        return self.good("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self.good("POST", path, body)

    def good(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer; anything else raises `failed`."""
        reply = self.ask(method, path, body)
        said = reply.json
        if not reply.is_ok:
            raise self.failed(f"{self.url}{path} answered {reply.status}: {reply.error_message}")
        if said is None:
            raise self.failed(f"{self.url}{path}: the answer is no JSON")
        return said


def is_here(url: str) -> bool:
    """Whether the address is this machine's: then no proxy has a say."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while chunk := source.read(_CHUNK):
            yield chunk
