"""One process of the embedded engine: its messages, its watchdog, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from tunesmith.core.environment import child_environment
from tunesmith.core.logs import logger
from tunesmith.programs.process_identity import kill
from tunesmith.programs.shim import read_process
from tunesmith.serving.engine.wire import MAX_LINE, line
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.heartbeat import Heartbeat

log = logger("gateway")
_CHUNK = 1 << 20
_TAIL = 4 << 10
_POLL_INTERVAL_S = 0.25
_END_S = 5.0
_RETRY_AFTER_S = 1.0
_FILES_S = 30.0
_FILE_ERRORS = frozenset({"adapter_refused", "load_failed"})
"""Error codes about local files: clients get a generic message, the details go to the log."""

_Message = Mapping[str, Any]
OnHang = Callable[["EngineProcess", str], None]
"""Called with the process that hung, and the reason."""


class EngineStream:
    """The messages that answer one request."""

    def __init__(self, child: EngineProcess, request_id: str) -> None:
        self.id = request_id
        self._child = child
        self._messages: asyncio.Queue[_Message | EngineError] = asyncio.Queue()
        self.is_over = False

    def send(self, data: bytes) -> None:
        self._child.send(data)

    def on_message(self, message: _Message | EngineError) -> None:
        self._messages.put_nowait(message)

    async def next(self) -> _Message:
        message = await self._messages.get()
        self.is_over = isinstance(message, EngineError) or "delta" not in message
        if isinstance(message, EngineError):
            raise message
        if "error" in message:
            raise _refusal(message["error"])
        return message


class EngineProcess:
    """One engine process: requests and answers share one socket, matched by id."""

    def __init__(
        self, process: asyncio.subprocess.Process, max_bytes: int | None, hang_s: float, on_hang: OnHang
    ) -> None:
        self.pid = process.pid
        self.failure: EngineError | None = None
        """Why it ended or gets no more requests; None while it runs."""
        self.heartbeat = Heartbeat(
            process.pid, hang_s, lambda number: self.send(line({"op": "ping", "number": number}))
        )
        self._process, self._max_bytes, self._on_hang = process, max_bytes, on_hang
        self._started = read_process(process.pid)
        self._numbers = itertools.count(1)
        self._streams: dict[str, EngineStream] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._why: EngineError | None = None
        self._is_over = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = [asyncio.create_task(self._keep_tail())]

    @classmethod
    async def spawn(
        cls,
        spec: EngineSpec,
        max_bytes: int | None,
        hang_s: float,
        on_hang: OnHang,
        pass_environment: Sequence[str] = (),
    ) -> EngineProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "tunesmith.serving.engine.main",
                    str(theirs.fileno()),
                    spec.model_dump_json(),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=child_environment(os.environ, pass_environment),
            )
        child = cls(process, max_bytes, hang_s, on_hang)
        reader, child._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        child._tasks += [asyncio.create_task(child._listen(reader)), asyncio.create_task(child._watch())]
        return child

    async def ready(self) -> None:
        await asyncio.shield(self._ready)

    @contextlib.contextmanager
    def open_stream(self) -> Any:
        """A stream for one request; leaving the block before its end cancels the request."""
        if self.failure is not None:
            raise self.failure
        stream = EngineStream(self, str(next(self._numbers)))
        self._streams[stream.id] = stream
        try:
            yield stream
        finally:
            del self._streams[stream.id]
            if not stream.is_over:
                self.send(line({"op": "cancel", "id": stream.id}))

    def send(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        while self._streams and self.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._why = stopped()
        if self._writer is not None:
            self._writer.close()  # the program ends by itself
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill it; returns when it has ended."""
        self._kill()
        await self.gone()

    async def gone(self) -> None:
        """Wait until it has ended; gives up on a process that survives SIGKILL for 5 s."""
        _, left = await asyncio.wait(self._tasks, timeout=_END_S)
        if left:
            log.warning("engine_does_not_end", pid=self.pid, waited_s=_END_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for one in lines:
                    self._on_message(orjson.loads(one))
        self._kill()  # its channel is closed, so it is of no use
        code = await self._process.wait()
        self._is_over.set()
        await self._tasks[0]
        if self._writer is not None:
            self._writer.close()
        self._fail(self._why or _death(code, self._tail))

    def _on_message(self, message: _Message) -> None:
        if self.failure is not None:  # its requests have failed already
            return
        if "ready" in message and not self._ready.done():
            self.heartbeat.ready()
            self._ready.set_result(None)
        if "heartbeat" in message:
            self.heartbeat.on_report(message["heartbeat"])
        if "id" not in message:
            return
        stream = self._streams.get(message["id"])
        if stream is not None:  # else the request was cancelled
            stream.on_message(message)

    def _fail(self, failure: EngineError) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        for stream in self._streams.values():
            stream.on_message(failure)
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # there may be no waiter

    async def _keep_tail(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_CHUNK):
            self._tail = (self._tail + data)[-_TAIL:]

    async def _watch(self) -> None:
        """Kill a process that exceeds its memory limit or hangs."""
        while self._process.returncode is None and not self._is_over.is_set():
            taken = resident(self.pid)
            if self._max_bytes is not None and taken > self._max_bytes:
                problem = f"took {taken / (1 << 30):.1f} GB, more than serve.max_memory_gb"
                self._end_it("engine_memory", problem)
            elif self.failure is None and (hang := self.heartbeat.check()) is not None:
                self._end_it("engine_hung", hang)
                self._on_hang(self, f"the engine {hang}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_INTERVAL_S):
                    await self._is_over.wait()

    def _kill(self) -> None:
        """Not by asyncio: before it sends a signal it reaps a child that has ended, and the exit status is lost."""
        if self._started is not None:
            kill(self._started)
        else:  # without /proc
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _end_it(self, code: str, what: str) -> None:
        """Fail its requests at once: a process in a system call may survive SIGKILL for a while."""
        if self._why is not None:
            return
        self._why = EngineError(
            f"the engine {what}; it is started again",
            code=code,
            http_status=503,
            retry_after_s=_RETRY_AFTER_S,
            public="the engine was restarted; retry",
        )
        log.warning("engine_is_ended", pid=self.pid, problem=what)
        self._kill()
        if self._writer is not None:
            self._writer.close()
        self._fail(self._why)


def resident(pid: int) -> int:
    """Bytes of memory of a process; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as source:
            return int(source.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _refusal(raw: Mapping[str, Any]) -> EngineError:
    public, retry_after_s = None, raw["retry_after_s"]
    if raw["code"] in _FILE_ERRORS:
        log.warning("adapter_not_loaded", problem=raw["message"])
        public, retry_after_s = "the files of this version cannot be used; see the server log", _FILES_S
    return EngineError(
        raw["message"], code=raw["code"], http_status=raw["status"], retry_after_s=retry_after_s, public=public
    )


def stopped() -> EngineError:
    return EngineError(
        "the engine was stopped; retry", code="engine_stopped", http_status=503, retry_after_s=_RETRY_AFTER_S
    )


def _death(code: int, tail: bytes) -> EngineError:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    said = " ".join(tail.decode(errors="replace").split())[-600:]
    message = f"the engine {how}{': ' + said if said else ''}"
    log.warning("engine_died", problem=message)
    public = f"the engine {how}; retry"
    return EngineError(message, code="engine_died", http_status=503, retry_after_s=_RETRY_AFTER_S, public=public)
