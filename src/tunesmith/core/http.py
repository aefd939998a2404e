"""HTTP calls, bounded in time and size: no redirects, no proxy for this machine, and a key that appears nowhere.

`Http` is a server that is called again and again (targets). `post_within` has one deadline over the whole call
(teachers). The gateway keeps clients and streams: it uses `client_options`, `translated` and `read_body`.

A call without a whole answer raises CallFailed:
├── NotReached   nobody took the request, so that it may be sent elsewhere
├── TooSlow      no answer in time; somebody may have worked for it
├── BrokeOff     the connection ended before the answer did
└── TooLarge     the body is larger than its reader takes
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from tunesmith.core.errors import TunesmithError

if TYPE_CHECKING:
    import httpx2

MAX_BYTES = 16 << 20
CONNECT_S = 5.0
IDENTITY = {"Accept-Encoding": "identity"}
"""Goes with every request: a compressed body could be of any size."""
_MAX_SHOWN = 300
_CHUNK = 1 << 20


class HttpFailed(TunesmithError):
    """The server cannot be reached, is too slow, says too much, or says no."""

    code = "http"


class CallFailed(Exception):
    """There is no whole answer; the message is the name of the library's error."""


class NotReached(CallFailed):
    """Nobody took the request."""


class TooSlow(CallFailed):
    """There was no answer in time."""


class BrokeOff(CallFailed):
    """The connection ended before the answer did."""


class TooLarge(CallFailed):
    """The body is larger than its reader takes."""


@contextmanager
def translated() -> Iterator[None]:
    """Inside it, what the HTTP library raises is a CallFailed."""
    import httpx2

    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError) as error:
        raise NotReached(type(error).__name__) from None
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise TooSlow(type(error).__name__) from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise BrokeOff(type(error).__name__) from None


def client_options(url: str, timeout_s: float, connect_s: float = CONNECT_S) -> dict[str, Any]:
    """How every client of ours is made, blocking or not. Each wait takes `timeout_s` at most, not all of a call."""
    import ssl

    import httpx2

    options = {
        "timeout": httpx2.Timeout(timeout_s, connect=min(connect_s, timeout_s)),
        "follow_redirects": False,
        "trust_env": not is_here(url),
    }
    if url.startswith("http://"):
        # never used, and trusts nobody; the default would read all certificates first, for 25 ms of each call
        options["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return options


class Body:
    """Collects a body piece by piece, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._pieces: list[bytes] = []
        self._left = limit

    def add(self, piece: bytes) -> None:
        """Raises TooLarge."""
        self._left -= len(piece)
        if self._left < 0:
            raise TooLarge
        self._pieces.append(piece)

    @property
    def content(self) -> bytes:
        return b"".join(self._pieces)


async def read_body(response: httpx2.Response, limit: int) -> bytes:
    """The bytes of a body as they were sent; raises TooLarge."""
    body = Body(limit)
    async for piece in response.aiter_raw():
        body.add(piece)
    return body.content


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

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
        return shown(raw, _MAX_SHOWN)

    @property
    def retry_after_s(self) -> float | None:
        """How long the server asks us to wait; None for a date, or anything else that is no number of seconds."""
        try:
            seconds = float(self.headers["retry-after"])
        except (KeyError, ValueError):
            return None
        return max(0.0, seconds) if math.isfinite(seconds) else math.inf


def shown(text: str, limit: int, hidden: Mapping[str, str] | None = None) -> str:
    """What a server said, as it may be repeated: one line, printable, cut; each key of `hidden` as its value."""
    plain = " ".join(text.split())
    for secret, instead in (hidden or {}).items():
        plain = plain.replace(secret, instead) if secret else plain
    printable = "".join(char if char.isprintable() else "?" for char in plain)
    return printable[:limit] + ("…" if len(printable) > limit else "")


def post_within(
    timeout_s: float,
    url: str,
    content: bytes,
    headers: Mapping[str, str],
    *,
    limit: int,
    connect_s: float = CONNECT_S,
) -> Reply:
    """POST once; raises CallFailed. Takes `timeout_s` at most, even if headers or body come byte by byte."""
    import httpx2

    async def call() -> Reply:
        with translated():
            async with (
                asyncio.timeout(timeout_s),
                httpx2.AsyncClient(**client_options(url, timeout_s, connect_s)) as client,
                client.stream("POST", url, content=content, headers={**headers, **IDENTITY}) as response,
            ):
                return Reply(response.status_code, await read_body(response, limit), response.headers)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call())
    # inside a notebook's loop: that one is busy, so a thread brings its own
    found: list[Reply | BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(call()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="http")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


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

        headers = {**self.headers, **IDENTITY}
        content: bytes | Iterator[bytes] | None = None
        if file is not None:
            content = _chunks(file)
            headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(file.stat().st_size)}
        elif body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            with (
                translated(),
                httpx2.Client(**client_options(self.url, self.timeout_s)) as client,
                client.stream(method, self.url + path, content=content, headers=headers) as response,
            ):
                reply = Reply(response.status_code, self._body(response), response.headers)
        except NotReached:
            raise self.failed(f"{self.url} cannot be reached; is the server running?") from None
        except TooSlow:
            raise self.failed(f"{self.url}{path}: no answer within {self.timeout_s:g} s") from None
        except BrokeOff as error:
            raise self.failed(f"{self.url}{path}: the connection broke off ({error})") from None
        except TooLarge:
            raise self.failed(f"{self.url}: the answer has more than {MAX_BYTES >> 20} MiB") from None
        if reply.status in (401, 403):
            raise self.failed(f"{self.url} refuses the key ({reply.status}); set options.key_env and that variable")
        return reply

    def _body(self, response: httpx2.Response) -> bytes:
        """The body; one that comes in drops is as slow as one that does not come."""
        body, deadline = Body(MAX_BYTES), time.monotonic() + self.timeout_s
        for piece in response.iter_raw():
            body.add(piece)
            if time.monotonic() > deadline:
                raise self.failed(f"{self.url}: the answer was not whole after {self.timeout_s:g} s")
        return body.content

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
