"""The embedded engines: one per model folder, started on first use; the longest idle one is stopped first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tunesmith.core.errors import ConfigError
from tunesmith.core.logs import logger
from tunesmith.profiles.base_model import base_digest, base_files
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.readings import ProbeResult
from tunesmith.serving.gateway.adapter_cache import AdapterCache
from tunesmith.serving.gateway.admission import AdmissionControl
from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.model_router import ModelRouter, Route
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

log = logger("gateway")
Device = Literal["auto", "cpu", "cuda"]
MakeEngine = Callable[[Route, Device], EmbeddedEngine]
_POLL_INTERVAL_S = 0.02
_STOP_GRACE_S = 5.0
_REHASH_INTERVAL_S = 15.0


class EngineHandle:
    """One engine with its adapter cache and its number of running requests."""

    def __init__(self, route: Route, engine: EmbeddedEngine, adapter_cache: AdapterCache) -> None:
        self.folder = route.folder
        self.whole = route.version.name if route.version.is_whole else None
        """The fully fine-tuned version that it serves, if it serves one."""
        self.engine = engine
        self.adapter_cache = adapter_cache
        self.num_active = 0
        self.used_at = time.monotonic()
        self._starting: asyncio.Task[None] | None = None
        self.base_digest: str | None = None
        self.hashed_start = 0
        """The number of the engine process for which the base model was hashed."""
        self.hashed_at = 0.0

    @property
    def is_ready(self) -> bool:
        return self.engine.pid is not None

    async def start(self) -> None:
        """Start the engine unless it runs. Cancelling one waiter does not cancel the start."""
        if self.is_ready:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_log_failed_start)
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        begun = time.monotonic()
        log.info("engine_starts", base=self.folder.name)
        await self.engine.start()
        log.info("engine_ready", base=self.folder.name, seconds=round(time.monotonic() - begun, 1))


def _log_failed_start(task: asyncio.Task[None]) -> None:
    """Log a failed start, even if no request waits for it any more; the next request tries again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("engine_failed", problem=str(error))


async def _digest_of(folder: Path) -> str:
    try:
        await asyncio.to_thread(base_files, folder)
        return await asyncio.to_thread(base_digest, folder)
    except ConfigError as error:
        public = "the files of the base model cannot be used; see the server log"
        log.warning("base_unusable", problem=error.message)
        raise EngineError(error.message, http_status=503, retry_after_s=_REHASH_INTERVAL_S, public=public) from None


class EnginePool:
    """Implements `interfaces.EngineControl`, and generation and loading for the routes."""

    def __init__(self, settings: ServeSettings, make_engine: MakeEngine) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._router: ModelRouter | None = None
        self.pass_on: Callable[[Route, GenerationRequest], Awaitable[str]] | None = None
        """Forwards a request to the server of a proxied profile."""
        self._handles: dict[Path, EngineHandle] = {}
        self._admissions: dict[Path, AdmissionControl] = {}
        self._opening = asyncio.Lock()
        self._released: Literal["unload", "cpu"] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks that stop the engines which ran on the CPU while training had the device, once they are idle."""

    def follow(self, router: ModelRouter) -> None:
        """Set the router, whose live versions are pinned; it is made after the pool."""
        self._router = router

    async def _find_route(self, name: str) -> Route:
        assert self._router is not None, "the server joins them before its first request"
        return await self._router.resolve(name)

    # -- for the routes

    def admission(self, folder: Path) -> AdmissionControl:
        most = self._settings.max_batch + self._settings.max_waiting
        return self._admissions.setdefault(folder, AdmissionControl(most))

    async def generate(
        self, route: Route, request: GenerationRequest
    ) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """Generate one answer, loading the version if needed; closing the iterator cancels it."""
        handle = await self._handle_for(route)
        handle.num_active += 1
        try:
            await self._prepare(handle, route)
            async with aclosing(handle.adapter_cache.answer(request, route.adapter)) as parts:
                async for part in parts:
                    yield part
        finally:
            handle.num_active -= 1
            handle.used_at = time.monotonic()

    async def get_ready(self, new: Route, old: Route) -> None:
        """Load the new version of an alias if an engine for it or the old one runs; else the first request does."""
        handles = [self._handles.get(route.folder) for route in (new, old)]
        if new.served.is_embedded and any(handle is not None and handle.is_ready for handle in handles):
            await self.load(new)

    async def load(self, route: Route) -> None:
        """Load a version, starting its engine if needed."""
        handle = await self._handle_for(route)
        handle.num_active += 1
        try:
            await self._prepare(handle, route)
            if route.adapter is not None:
                await handle.adapter_cache.load(route.adapter)
        finally:
            handle.num_active -= 1

    async def probe(
        self, route: Route, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult]:
        """The greedy answers of a version, for the parity probe."""
        handle = await self._handle_for(route)
        handle.num_active += 1
        try:
            await self._prepare(handle, route)
            async with handle.adapter_cache.acquire(route.adapter) as name:
                return await handle.engine.probe(name, prompts, max_tokens)
        finally:
            handle.num_active -= 1

    async def answer(self, name: str, request: GenerationRequest) -> str:
        """The complete answer of an exact version, for mirrored traffic; refused while requests are queued."""
        route = await self._find_route(name)
        if not route.served.is_embedded:
            assert self.pass_on is not None, "the server joins them before its first request"
            return await self.pass_on(route, request)
        admission = self.admission(route.folder)
        if admission.num_rows >= self._settings.max_batch:
            raise EngineError("the engine is busy with live requests", code="busy", http_status=503, retry_after_s=5.0)
        admission.acquire(1)
        texts: list[str] = []
        try:
            row = replace(request, adapter=route.adapter.name if route.adapter else None)
            async with aclosing(self.generate(route, row)) as parts:
                async for part in parts:
                    texts.append(part.text if isinstance(part, TextDelta) else "")
        finally:
            admission.release(1)
        return "".join(texts)

    async def unload(self, name: str) -> None:
        for handle in list(self._handles.values()):
            await handle.adapter_cache.unload(name)

    # -- engine handles

    async def _handle_for(self, route: Route) -> EngineHandle:
        folder = route.folder
        if self._released == "unload":
            raise EngineError(
                "a training run is using the device; retry later",
                code="device_in_use",
                http_status=503,
                retry_after_s=15.0,
            )
        if (found := self._handles.get(folder)) is not None:
            return found
        async with self._opening:
            handle = self._handles.get(folder)
            if handle is None:
                await self._evict_idle_engine()
                device: Device = "cpu" if self._released == "cpu" else self._settings.device
                engine = self._make_engine(route, device)
                adapter_cache = AdapterCache(
                    engine, max_adapters=self._settings.max_adapters, min_residency_s=self._settings.min_residency_s
                )
                handle = self._handles[folder] = EngineHandle(route, engine, adapter_cache)
            return handle

    async def _prepare(self, handle: EngineHandle, route: Route) -> None:
        """Start the engine, check that its base model is the one of the version, and update its pins."""
        handle.adapter_cache.pin(frozenset() if self._router is None else self._router.pinned())
        await handle.start()
        if not route.version.is_whole:  # the engine verifies a whole model by its digest as it starts
            await self._check_base(handle, route)

    async def _evict_idle_engine(self) -> None:
        """Stop the longest idle engine if serve.max_engines are running."""
        while len(self._handles) >= self._settings.max_engines:
            idle = [handle for handle in self._handles.values() if not handle.num_active]
            if not idle:
                raise EngineError(
                    f"{len(self._handles)} base models are in use and serve.max_engines allows no more; retry later",
                    code="engines_in_use",
                    http_status=503,
                    retry_after_s=5.0,
                )
            await self._close(min(idle, key=lambda handle: handle.used_at))

    async def _close(self, handle: EngineHandle) -> None:
        self._handles.pop(handle.folder, None)
        log.info("engine_ends", base=handle.folder.name)
        await handle.engine.stop(0.0)

    async def _check_base(self, handle: EngineHandle, route: Route) -> None:
        """Refuse a version that was trained on another base model than the engine has loaded.

        The files are hashed once per engine process.
        """
        wanted, start = route.version.base_digest, handle.engine.num_starts
        if handle.hashed_start != start:
            handle.base_digest, handle.hashed_start = await _digest_of(handle.folder), start
            handle.hashed_at = time.monotonic()
        if wanted is None or wanted == handle.base_digest:
            return
        if time.monotonic() - handle.hashed_at > _REHASH_INTERVAL_S:
            handle.hashed_at = time.monotonic()
            if await _digest_of(handle.folder) == wanted and not handle.num_active > 1:
                await self._close(handle)  # the files were restored: the next request starts an engine that loads them
        raise EngineError(
            f"{route.version.name} was trained on a different base model than {handle.folder.name} now contains; "
            "restore the original files (detected within a minute)",
            code="base_changed",
            http_status=503,
            retry_after_s=_REHASH_INTERVAL_S,
        )

    # -- interfaces.EngineControl

    @property
    def num_active(self) -> int:
        return sum(handle.num_active for handle in self._handles.values())

    async def release_device(self, mode: Literal["unload", "cpu"], drain_s: float) -> None:
        """Drain, then stop every engine; see `interfaces.EngineControl`."""
        self._released = mode
        deadline = time.monotonic() + drain_s
        while self.num_active and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_INTERVAL_S)
        async with self._opening:
            handles = list(self._handles.values())
            self._handles.clear()
        await asyncio.gather(*(handle.engine.stop(0.0) for handle in handles))

    async def reclaim_device(self) -> None:
        if self._released == "cpu":
            for handle in self._handles.values():
                task = asyncio.create_task(self._leave(handle))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            self._handles.clear()
        self._released = None

    async def _leave(self, handle: EngineHandle) -> None:
        try:
            while handle.num_active:
                await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            await handle.engine.stop(0.0)

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        handles = list(self._handles.values())
        self._handles.clear()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(handle.engine.stop(_STOP_GRACE_S) for handle in handles), return_exceptions=True)

    def loaded(self) -> list[str]:
        """The names of all versions in the memory of an engine."""
        full_models = [
            handle.whole for handle in self._handles.values() if handle.whole is not None and handle.is_ready
        ]
        return sorted(
            [*full_models, *(one["name"] for handle in self._handles.values() for one in handle.adapter_cache.state())]
        )

    @property
    def problems(self) -> list[str]:
        """The present problems of the engines."""
        return [handle.engine.problem for handle in self._handles.values() if handle.engine.problem is not None]

    def state(self) -> list[dict[str, object]]:
        """The state of each engine, for /healthz."""
        return [
            {
                "base": handle.folder.name,
                "is_ready": handle.is_ready,
                "num_active": handle.num_active,
                "problem": handle.engine.problem,
                "num_starts": handle.engine.num_starts,
                "num_hung": handle.engine.num_hung,
                "last_hang": handle.engine.last_hang,
                "adapters": handle.adapter_cache.state(),
            }
            for handle in self._handles.values()
        ]
