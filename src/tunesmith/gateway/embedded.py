"""The embedded engine as the gateway holds it: a child process, started when it is needed, and again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from tunesmith.domain.engine_spec import EngineSpec
from tunesmith.domain.generation import Ended, Generation, Piece
from tunesmith.domain.parity import Reading
from tunesmith.engine.wire import MAX_LINE, asked_line, ended_from, line, piece_from
from tunesmith.gateway.engine import EngineError
from tunesmith.logs import logger
from tunesmith.targets.base import ServedAdapter

log = logger("gateway")
_CHUNK = 1 << 20
_TAIL = 4 << 10
_LOOK_S = 0.25
_END_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_AGAIN_S = 1.0
_FILES_S = 30.0
_OF_FILES = frozenset({"adapter_refused", "load_failed"})
"""What is wrong with files is this machine's fault and nobody else's business."""

_Message = Mapping[str, Any]


class EmbeddedEngine:
    """Implements `Engine`. `num_starts` grows with every new process, which holds none of the adapters of the last."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        max_memory_gb: float | None = None,
        start_s: float = 900.0,
        hang_s: float = 300.0,
    ) -> None:
        """`hang_s`: an engine that was asked something and says nothing for so long is ended."""
        self.spec = spec
        self._hang_s = hang_s
        self._max_bytes = None if max_memory_gb is None else int(max_memory_gb * (1 << 30))
        self._start_s = start_s
        self._child: _Child | None = None
        self._starting: _Child | None = None
        self._is_stopped = False
        self._lock = asyncio.Lock()
        self.num_starts = 0
        self._num_failures = 0
        self._not_before = 0.0
        self._last_failure: EngineError | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return None if self._child is None or self._child.failure is not None else self._child.pid

    async def start(self) -> None:
        await self._running()

    async def stop(self, grace_s: float = 0.0) -> None:
        self._is_stopped = True  # whoever still waits for it must not start it anew: the device may be lent by then
        if self._starting is not None:
            await self._starting.kill()
        async with self._lock:
            child, self._child = self._child, None
            if child is not None:
                await child.stop(grace_s)

    async def generate(self, asked: Generation) -> AsyncGenerator[Piece | Ended, None]:
        child = await self._running()
        with child.conversation() as talk:
            try:
                talk.send(asked_line(replace(asked, id=talk.id)))
            except TypeError:
                text = "the request holds text that is no Unicode (half a surrogate pair); correct it"
                raise EngineError(text, code="invalid_prompt", http_status=400) from None
            while True:
                message = await talk.next()
                if "piece" in message:
                    yield piece_from(message["piece"])
                else:
                    yield ended_from(message["ended"])
                    return

    async def load(self, adapter: ServedAdapter) -> int:
        message = {"name": adapter.name, "path": str(adapter.path), "digest": adapter.digest}
        return int((await self._ask("load", message))["bytes"])

    async def unload(self, name: str) -> None:
        if self.pid is not None:
            await self._ask("unload", {"name": name})

    async def read(
        self, adapter: str | None, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[Reading]:
        if not prompts:
            return []
        said = await self._ask("read", {"adapter": adapter, "prompts": prompts, "max_tokens": max_tokens})
        return [Reading.model_validate(reading) for reading in said["readings"]]

    async def state(self) -> dict[str, Any] | None:
        """What it holds and computes; None while there is no process. Starts nothing."""
        if self.pid is None:
            return None
        return {**await self._ask("state", {}), "pid": self.pid, "bytes": _resident(self.pid or 0)}

    async def _ask(self, what: str, message: Mapping[str, Any]) -> dict[str, Any]:
        child = await self._running()
        with child.conversation() as talk:
            talk.send(line({"do": what, "id": talk.id, **message}))
            return dict((await talk.next())["done"])

    async def _running(self) -> _Child:
        child = self._child
        if child is not None and child.failure is None:
            return child
        async with self._lock:
            child = self._child
            if child is not None and child.failure is None:
                return child
            if self._is_stopped:
                raise _stopped()
            wait_s = self._not_before - time.monotonic()
            if wait_s > 0 and self._last_failure is not None:
                self._last_failure.retry_after_s = wait_s
                raise self._last_failure
            return await self._start()

    async def _start(self) -> _Child:
        child = await _Child.spawn(self.spec, self._max_bytes, self._hang_s)
        self.num_starts += 1
        self._starting = child
        try:
            if self._is_stopped:
                raise _stopped()
            async with asyncio.timeout(self._start_s):
                await child.ready()
        except BaseException as error:
            await child.kill()
            if self._is_stopped or not isinstance(error, EngineError | TimeoutError):
                raise
            self._num_failures += 1
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._num_failures - 1))
            self._not_before = time.monotonic() + pause_s
            reason = str(error) if isinstance(error, EngineError) else f"not ready after {self._start_s:.0f} s"
            self._last_failure = EngineError(
                f"the engine cannot be started: {reason}",
                code=getattr(error, "code", "engine_start"),
                http_status=503,
                retry_after_s=pause_s,
                public="the engine cannot be started; the server's log says why",
            )
            log.warning("engine_not_started", base=self.spec.base, problem=reason)
            raise self._last_failure from None
        finally:
            self._starting = None
        self._num_failures = 0
        self._child = child
        log.info("engine_started", pid=child.pid, base=self.spec.base, start=self.num_starts)
        return child


class _Talk:
    """One request and what comes back for it."""

    def __init__(self, child: _Child, request_id: str) -> None:
        self.id = request_id
        self._child = child
        self._messages: asyncio.Queue[_Message | EngineError] = asyncio.Queue()
        self.is_over = False

    def send(self, data: bytes) -> None:
        self._child.send(data)

    def hear(self, message: _Message | EngineError) -> None:
        self._messages.put_nowait(message)

    async def next(self) -> _Message:
        message = await self._messages.get()
        self.is_over = isinstance(message, EngineError) or "piece" not in message
        if isinstance(message, EngineError):
            raise message
        if "error" in message:
            raise _refusal(message["error"])
        return message


class _Child:
    """One engine process: what is asked goes down one socket, answers are told apart by their number."""

    def __init__(self, process: asyncio.subprocess.Process, max_bytes: int | None, hang_s: float) -> None:
        self.pid = process.pid
        self.failure: EngineError | None = None
        """Why it is gone; None while it lives."""
        self._process, self._max_bytes, self._hang_s = process, max_bytes, hang_s
        self._numbers = itertools.count(1)
        self._talks: dict[str, _Talk] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._why: EngineError | None = None
        self._is_over = asyncio.Event()
        self._heard_s = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = [asyncio.create_task(self._keep_tail())]

    @classmethod
    async def spawn(cls, spec: EngineSpec, max_bytes: int | None, hang_s: float) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tunesmith.engine.main", str(theirs.fileno()), spec.model_dump_json()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        child = cls(process, max_bytes, hang_s)
        reader, child._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        child._tasks += [asyncio.create_task(child._listen(reader)), asyncio.create_task(child._watch())]
        return child

    async def ready(self) -> None:
        await asyncio.shield(self._ready)

    @contextlib.contextmanager
    def conversation(self) -> Any:
        """Leaving it before the end cancels what was asked."""
        if self.failure is not None:
            raise self.failure
        if not self._talks:
            self._heard_s = time.monotonic()  # silence counts from the first question on
        talk = _Talk(self, str(next(self._numbers)))
        self._talks[talk.id] = talk
        try:
            yield talk
        finally:
            del self._talks[talk.id]
            if not talk.is_over:
                self.send(line({"do": "cancel", "id": talk.id}))

    def send(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        while self._talks and self.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._why = _stopped()
        if self._writer is not None:
            self._writer.close()  # the program ends by itself
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End it at once; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await asyncio.wait(self._tasks)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for one in lines:
                    self._hear(orjson.loads(one))
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)  # a program that no longer speaks is of no use
        code = await self._process.wait()
        self._is_over.set()
        await self._tasks[0]
        if self._writer is not None:
            self._writer.close()
        self._fail(self._why or _death(code, self._tail))

    def _hear(self, message: _Message) -> None:
        self._heard_s = time.monotonic()
        if "ready" in message and not self._ready.done():
            self._ready.set_result(None)
        if "id" not in message:
            return
        talk = self._talks.get(message["id"])
        if talk is not None:  # else: nobody waits for it any more
            talk.hear(message)

    def _fail(self, failure: EngineError) -> None:
        self.failure = failure
        for talk in self._talks.values():
            talk.hear(failure)
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # it may be that nobody waits

    async def _keep_tail(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_CHUNK):
            self._tail = (self._tail + data)[-_TAIL:]

    async def _watch(self) -> None:
        """End a process that takes more memory than it may, before the machine suffers; and one that hangs."""
        while self._process.returncode is None and not self._is_over.is_set():
            taken = _resident(self.pid)
            if self._max_bytes is not None and taken > self._max_bytes:
                told = f"took {taken / (1 << 30):.1f} GB, more than serve.max_memory_gb"
                self._end_it("engine_memory", told)
            elif self._talks and time.monotonic() - self._heard_s > self._hang_s:
                self._end_it("engine_hung", f"said nothing for {self._hang_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_over.wait()

    def _end_it(self, code: str, what: str) -> None:
        self._why = EngineError(
            f"the engine {what}; it is started again when it is next asked",
            code=code,
            http_status=503,
            retry_after_s=_AGAIN_S,
        )
        log.warning("engine_is_ended", pid=self.pid, problem=what)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)


def _resident(pid: int) -> int:
    """Bytes of memory of a process; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as source:
            return int(source.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _refusal(raw: Mapping[str, Any]) -> EngineError:
    public, retry_after_s = None, raw["retry_after_s"]
    if raw["code"] in _OF_FILES:
        log.warning("adapter_not_loaded", problem=raw["message"])
        public, retry_after_s = "this version's files cannot be used; the server's log says why", _FILES_S
    return EngineError(
        raw["message"], code=raw["code"], http_status=raw["status"], retry_after_s=retry_after_s, public=public
    )


def _stopped() -> EngineError:
    return EngineError(
        "the engine was stopped; ask again", code="engine_stopped", http_status=503, retry_after_s=_AGAIN_S
    )


def _death(code: int, tail: bytes) -> EngineError:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    said = " ".join(tail.decode(errors="replace").split())[-600:]
    message = f"the engine {how}{': ' + said if said else ''}"
    log.warning("engine_died", problem=message)
    public = f"the engine {how}; ask again"
    return EngineError(message, code="engine_died", http_status=503, retry_after_s=_AGAIN_S, public=public)
