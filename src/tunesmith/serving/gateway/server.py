"""`tunesmith serve`: assembles the gateway and runs it from the server lock to its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tunesmith.core.clock import utc_now
from tunesmith.core.errors import ConfigError, StoreError, UsageError
from tunesmith.core.files import private_files
from tunesmith.core.ids import new_id, new_token
from tunesmith.core.logs import logger
from tunesmith.profiles.base_model import base_problem
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.device.queries import servers
from tunesmith.programs.device.rules import ServerState
from tunesmith.runs.session import Session
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.access import LOOPBACK
from tunesmith.serving.gateway.app import make_app
from tunesmith.serving.gateway.captures import Captures
from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
from tunesmith.serving.gateway.engine_pool import Device, EnginePool
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.hand_over import DeviceHandOver, Following
from tunesmith.serving.gateway.http_server import HttpServer
from tunesmith.serving.gateway.interfaces import Upstream
from tunesmith.serving.gateway.key_file import KeyFile
from tunesmith.serving.gateway.model_router import ModelRouter, Route
from tunesmith.serving.gateway.proxy import whole_from_upstream
from tunesmith.serving.gateway.served_profiles import ServedProfile
from tunesmith.serving.gateway.server_lock import ServerLock
from tunesmith.serving.gateway.shadow import ShadowMirror
from tunesmith.serving.gateway.traffic import TrafficCounter
from tunesmith.serving.gateway.upstream import upstream_of

log = logger("gateway")
BEAT_S = 2.0
ALIVE_S = 10.0
_FLUSH_S = 5.0
_NUM_THREADS = 32
_SWITCH_S = 0.0005
"""Thread switch interval. Python's default of 5 ms would let capture threads delay streaming."""


@dataclass(frozen=True)
class Ready:
    """The address and state of a server that has started."""

    server_id: str
    url: str
    serving: dict[str, str]
    needs_key: bool
    problems: dict[str, str]
    """By profile, why it is not served or cannot answer."""
    num_hosts: int | None = None
    """If it listens beyond loopback: the number of names in serve.allowed_hosts."""


class Server:
    """One gateway process. `run` returns after a signal, when it has stopped."""

    def __init__(self, session: Session, settings: ServeSettings, on_ready: Callable[[Ready], None]) -> None:
        self._session = session
        self._settings = settings
        self._on_ready = on_ready
        self._key_file = None if settings.key_file is None else session.workspace.locate(settings.key_file)
        if not is_loopback(settings.host) and self._key_file is None:
            raise ConfigError(
                f"serve.host is {settings.host!r}, so other machines can connect: set serve.key_file to a file with "
                "API keys, or serve on 127.0.0.1"
            )
        self._num_signals = 0

    def run(self) -> None:
        self._session.database  # noqa: B018 - without the store nobody knows what is live
        lock = ServerLock(self._session.workspace)
        sys.setswitchinterval(_SWITCH_S)
        try:
            with private_files():
                asyncio.run(self._serve(lock))
        finally:
            lock.release()

    async def _serve(self, lock: ServerLock) -> None:
        # a store that hangs blocks threads; polling, heartbeats and long bodies need others
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "tunesmith-serve"))
        listening = _listen(self._settings.host, self._settings.port)
        url = _url(self._settings.host, listening.getsockname()[1])
        server_id, token = new_id("srv"), new_token()
        keys = KeyFile(token, self._key_file)
        gateway = self._gateway(server_id)
        http = HttpServer(make_app(gateway, keys), self._settings.grace_s)
        self._on_signals(gateway, http, lock)
        await gateway.router.refresh()
        process = lock.publish(server_id, url, token)
        row = servers.Server(
            id=server_id,
            host=socket.gethostname(),
            process=process,
            url=url,
            device=device_of(self._settings),
            state=ServerState.SERVING,
            serving={},
            counts={},
            started_at=utc_now(),
        )
        helpers = [
            asyncio.create_task(work)
            for work in (
                keys.follow(),
                gateway.router.follow(self._settings.follow_s),
                self._beat(gateway, row),
                gateway.hand_over.run(),
                gateway.shadow.run(),
                gateway.traffic.run(),
            )
        ]
        needs_key, is_open = self._key_file is not None, not is_loopback(self._settings.host)
        num_hosts = len(self._settings.allowed_hosts) if is_open else None
        self._on_ready(Ready(server_id, url, _serving(gateway), needs_key, _problems(gateway), num_hosts))
        try:
            await http.serve(sockets=[listening])
        finally:
            await self._end(gateway, helpers)

    def _gateway(self, server_id: str) -> Gateway:
        session, settings = self._session, self._settings
        engines = EnginePool(settings, self._make_engine)
        router = ModelRouter(session, engines.get_ready)
        engines.follow(router)
        following = Following(server_id, device_of(settings), ALIVE_S)
        hand_over = DeviceHandOver(session.database, settings, engines, following)
        counts: Counter[str] = Counter()
        gateway = Gateway(
            server_id=server_id,
            session=session,
            settings=settings,
            router=router,
            engines=engines,
            captures=Captures(session),
            hand_over=hand_over,
            shadow=ShadowMirror(session, settings, engines, hand_over, counts),
            traffic=TrafficCounter(session),
            make_upstream=self._make_upstream,
            counts=counts,
        )
        engines.pass_on = partial(whole_from_upstream, gateway)
        return gateway

    def _make_engine(self, route: Route, device: Device) -> EmbeddedEngine:
        version = route.version
        is_whole = version.is_whole and version.adapter is not None
        spec = EngineSpec(
            base=str(route.served.base),
            digest=version.base_digest if is_whole else None,
            weights=str(route.folder) if is_whole else None,
            weights_digest=version.digest if is_whole else None,
            device=device,
            max_batch=self._settings.max_batch,
        )
        settings = self._settings
        return EmbeddedEngine(
            spec,
            max_memory_gb=settings.max_memory_gb,
            hang_s=settings.engine_hang_s,
            pass_environment=self._session.settings.worker.pass_environment,
        )

    def _make_upstream(self, served: ServedProfile) -> Upstream:
        return upstream_of(served, self._session.workspace.root, self._settings.timeout_s)

    def _on_signals(self, gateway: Gateway, http: HttpServer, lock: ServerLock) -> None:
        def stop() -> None:
            self._num_signals += 1
            if self._num_signals > 1:  # now: engines end when our side of their socket closes
                lock.release()
                os._exit(1)
            log.info("stopping", answers=gateway.engines.num_active)
            gateway.is_ending = True
            http.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)

    async def _end(self, gateway: Gateway, helpers: list[asyncio.Task[None]]) -> None:
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await gateway.engines.close()
        for upstream in gateway.upstreams.values():
            await upstream.close()
        await asyncio.to_thread(gateway.captures.close, _FLUSH_S)
        with contextlib.suppress(StoreError):
            await asyncio.to_thread(gateway.traffic.flush)
            await asyncio.to_thread(self._leave, gateway.server_id)
        log.info("stopped", **gateway.counts)

    async def _beat(self, gateway: Gateway, row: servers.Server) -> None:
        """Write heartbeats and the served versions to the store; an unavailable store does not affect serving."""
        while True:
            with gateway.router.store_health.writing():
                await asyncio.to_thread(self._beat_once, gateway, row)
            await asyncio.sleep(BEAT_S)

    def _beat_once(self, gateway: Gateway, row: servers.Server) -> None:
        serving: dict[str, str | None] = {}
        for profile, version in gateway.router.live_versions().items():
            serving[profile] = None if version.adapter is None else version.name
        captured = gateway.captures.counts()
        counts = {**gateway.counts, **{name: captured[name] for name in ("num_stored", "num_dropped", "num_refused")}}
        counts["num_problems"] = len(gateway.router.problems) + len(gateway.engines.problems)
        state = gateway.hand_over.state
        with self._session.database.write(durable=False) as tx:
            if not servers.heartbeat(tx, row.id, ALIVE_S, state=state, serving=serving, counts=counts):
                servers.remove_expired(tx)
                servers.register(tx, row, ALIVE_S)
                servers.heartbeat(tx, row.id, ALIVE_S, state=state, serving=serving, counts=counts)

    def _leave(self, server_id: str) -> None:
        with self._session.database.write() as tx:
            servers.leave(tx, server_id)


def is_loopback(host: str) -> bool:
    if host in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def device_of(settings: ServeSettings) -> str:
    """cpu or cuda, decided without loading torch."""
    if settings.device != "auto":
        return settings.device
    has_gpu = Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    return "cuda" if has_gpu else "cpu"


def _problems(gateway: Gateway) -> dict[str, str]:
    """By profile, for whoever starts the server: with the whole path of a base, which callers are never told."""
    board = gateway.router
    found = dict(board.problems)
    for profile, problem in board.problems.items():
        base = board.served_profiles[profile].base if profile in board.served_profiles else None
        if base is not None and problem == base_problem(base):
            found[profile] = base_problem(base, told=base) or problem
    return found


def _serving(gateway: Gateway) -> dict[str, str]:
    return {profile: version.name for profile, version in gateway.router.live_versions().items()}


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port, or 0 for any"
        ) from None
    return listening


def _url(host: str, port: int) -> str:
    """The URL of this server on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
    name = everywhere.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
