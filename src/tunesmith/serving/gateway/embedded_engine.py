"""The embedded engine as the gateway sees it: a child process, started on demand, restarted if it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.core.logs import logger
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.programs.readings import ProbeResult
from tunesmith.serving.engine.wire import decode_delta, decode_end, encode_request, line
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.engine_process import EngineProcess, resident, stopped
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

log = logger("gateway")
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0


class EmbeddedEngine:
    """Implements `Engine`. `num_starts` grows with every new process, which holds none of the adapters of the last."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        max_memory_gb: float | None = None,
        start_s: float = 900.0,
        hang_s: float = 10.0,
        pass_environment: Sequence[str] = (),
    ) -> None:
        """`hang_s`: an engine without a heartbeat for this long is replaced."""
        self.spec = spec
        self._hang_s = hang_s
        self._pass_environment = tuple(pass_environment)
        self._replacing: asyncio.Task[None] | None = None
        self.num_hung = 0
        """How many of its processes hung and were ended."""
        self.last_hang: str | None = None
        self._max_bytes = None if max_memory_gb is None else int(max_memory_gb * (1 << 30))
        self._start_s = start_s
        self._child: EngineProcess | None = None
        self._starting: EngineProcess | None = None
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

    @property
    def problem(self) -> str | None:
        """What is wrong with its process now; None while it gets on, or none is needed."""
        if self._replacing is not None and not self._replacing.done():
            return f"{self.last_hang}; it is being replaced"
        child = self._starting or self._child
        return None if child is None or child.failure is not None else child.heartbeat.worry

    async def start(self) -> None:
        await self._running()

    async def stop(self, grace_s: float = 0.0) -> None:
        self._is_stopped = True  # waiters must not start it again: the device may be released by then
        if self._starting is not None:
            await self._starting.kill()
        async with self._lock:
            child, self._child = self._child, None
            if child is not None:
                await child.stop(grace_s)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        child = await self._running()
        with child.open_stream() as stream:
            try:
                stream.send(encode_request(replace(request, id=stream.id)))
            except TypeError:
                text = "the request contains invalid Unicode (an unpaired surrogate)"
                raise EngineError(text, code="invalid_prompt", http_status=400) from None
            while True:
                message = await stream.next()
                if "delta" in message:
                    yield decode_delta(message["delta"])
                else:
                    yield decode_end(message["ended"])
                    return

    async def load(self, adapter: ServedAdapter) -> int:
        message = {"name": adapter.name, "path": str(adapter.path), "digest": adapter.digest}
        return int((await self._ask("load", message))["bytes"])

    async def unload(self, name: str) -> None:
        if self.pid is not None:
            await self._ask("unload", {"name": name})

    async def probe(
        self, adapter: str | None, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult]:
        if not prompts:
            return []
        said = await self._ask("probe", {"adapter": adapter, "prompts": prompts, "max_tokens": max_tokens})
        return [ProbeResult.model_validate(reading) for reading in said["readings"]]

    async def state(self) -> dict[str, Any] | None:
        """Its adapters and running sequences; None without a process. Does not start one."""
        if self.pid is None:
            return None
        return {**await self._ask("state", {}), "pid": self.pid, "bytes": resident(self.pid or 0)}

    async def _ask(self, operation: str, message: Mapping[str, Any]) -> dict[str, Any]:
        child = await self._running()
        with child.open_stream() as stream:
            stream.send(line({"op": operation, "id": stream.id, **message}))
            return dict((await stream.next())["done"])

    async def _running(self) -> EngineProcess:
        child = self._child
        if child is not None and child.failure is None:
            return child
        async with self._lock:
            child = self._child
            if child is not None and child.failure is None:
                return child
            if self._is_stopped:
                raise stopped()
            wait_s = self._not_before - time.monotonic()
            if wait_s > 0 and self._last_failure is not None:
                self._last_failure.retry_after_s = wait_s
                raise self._last_failure
            if child is not None:
                await child.gone()  # its memory is needed again
            return await self._start()

    def _on_hang(self, child: EngineProcess, reason: str) -> None:
        """Start a new process at once; where it hung as it started, only the next request tries again."""
        self.num_hung += 1
        self.last_hang = reason
        if child is self._child and not self._is_stopped:
            self._replacing = asyncio.create_task(self._replace(child.pid))

    async def _replace(self, old_pid: int) -> None:
        begun = time.monotonic()
        with contextlib.suppress(EngineError):
            child = await self._running()
            seconds = round(time.monotonic() - begun, 1)
            log.info("engine_replaced", base=self.spec.base, old_pid=old_pid, pid=child.pid, seconds=seconds)

    async def _start(self) -> EngineProcess:
        child = await EngineProcess.spawn(
            self.spec, self._max_bytes, self._hang_s, self._on_hang, self._pass_environment
        )
        self.num_starts += 1
        self._starting = child
        try:
            if self._is_stopped:
                raise stopped()
            async with asyncio.timeout(self._start_s):
                await child.ready()
        except BaseException as error:
            await child.kill()
            if self._is_stopped or not isinstance(error, EngineError | TimeoutError):
                raise
            self._num_failures += 1
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._num_failures - 1))
            self._not_before = time.monotonic() + pause_s
            reason = str(error) if isinstance(error, EngineError) else f"not ready after {self._start_s:.0f} s"
            self._last_failure = EngineError(
                f"the engine cannot be started: {reason}",
                code=getattr(error, "code", "engine_start"),
                http_status=503,
                retry_after_s=pause_s,
                public="the engine cannot be started; see the server log",
            )
            log.warning("engine_not_started", base=self.spec.base, problem=reason)
            raise self._last_failure from None
        finally:
            self._starting = None
        self._num_failures = 0
        self._child = child
        log.info("engine_started", pid=child.pid, base=self.spec.base, start=self.num_starts)
        return child
