"""The gateway as its routes see it: settings, router, engines, captures, hand-over and shadow traffic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from tunesmith.core.errors import quoted
from tunesmith.core.files import canonical_json
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.settings import ServeSettings
from tunesmith.runs.session import Session
from tunesmith.serving.gateway.admission import RateLimiter
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.captures import Captures
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.engine_pool import EnginePool
from tunesmith.serving.gateway.idempotency import IdempotencyCache
from tunesmith.serving.gateway.interfaces import HandOver, Shadow, Upstream
from tunesmith.serving.gateway.model_router import ModelRouter, Route
from tunesmith.serving.gateway.scopes import Caller, Scope
from tunesmith.serving.gateway.served_profiles import ServedProfile
from tunesmith.serving.gateway.traffic import TrafficCounter
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

_BAD_REQUEST = 400
_DEVICE_RELEASED = frozenset({"device_in_use", "engine_stopped"})
"""Error codes raised when the device was handed to training after admission and before the first token."""
_TRANSIENT = frozenset(
    {*_DEVICE_RELEASED, "busy", "engine_died", "engine_hung", "engines_in_use", "in_use", "adapter_capacity"}
)
"""Transient error codes; they do not mark the version as unhealthy."""
_RETRY_PAUSE_S = 0.05
_SERVED_BEFORE = frozenset({AdapterState.LIVE, AdapterState.SUPERSEDED})
"""States of versions that any key with the scope `chat` may name."""


@dataclass
class Gateway:
    server_id: str
    session: Session
    settings: ServeSettings
    router: ModelRouter
    engines: EnginePool
    captures: Captures
    hand_over: HandOver
    shadow: Shadow
    traffic: TrafficCounter
    make_upstream: Callable[[ServedProfile], Upstream]
    upstreams: dict[str, Upstream] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    idempotency: IdempotencyCache = field(default_factory=IdempotencyCache)
    feedback_limiter: RateLimiter = field(init=False)
    is_ending: bool = False
    num_rating: int = 0
    """Feedback that is being stored now."""

    def __post_init__(self) -> None:
        self.feedback_limiter = RateLimiter(self.settings.max_feedback_per_minute)

    def refuse_while_ending(self) -> None:
        if self.is_ending:
            raise ApiError(503, "the server is stopping; retry later", code="stopping", retry_after_s=5.0)

    async def route_for(self, model: str, caller: Caller) -> Route:
        """Where a caller's request goes. An unknown version and one that the caller may not use are the same 404."""
        if caller.may(Scope.ANY_VERSION) or "@v" not in model:
            return await self.router.resolve(model)
        with suppress(ApiError):
            route = await self.router.resolve(model)
            if route.version.state in _SERVED_BEFORE:
                return route
        message = (
            f"no model {quoted(model)} that this API key may ask for; "
            "a version that never went live, or was taken back, "
            "needs a key with the scope any_version. GET /v1/models lists what is live"
        )
        raise ApiError(404, message, code="model_not_found", param="model")

    def upstream_of(self, served: ServedProfile) -> Upstream:
        """The upstream server of a proxied profile; made on first use."""
        key = canonical_json([served.profile, served.target.model_dump(mode="json")])
        if key not in self.upstreams:
            self.upstreams[key] = self.make_upstream(served)
        return self.upstreams[key]

    async def generate(
        self, route: Route, request: GenerationRequest
    ) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """One answer of the embedded engine; waits for the device, retries if it is released before the first token."""
        while True:
            await self.hand_over.admit()
            has_begun = False
            try:
                async with aclosing(self.engines.generate(route, request)) as parts:
                    async for part in parts:
                        if not has_begun:
                            self.router.record_result(route.version.name, None)
                        has_begun = True
                        yield part
                return
            except EngineError as error:
                if not has_begun and error.code not in _TRANSIENT and error.http_status != _BAD_REQUEST:
                    self.router.record_result(route.version.name, error.public or error.message)
                if has_begun or self.is_ending or error.code not in _DEVICE_RELEASED:
                    raise
            await asyncio.sleep(_RETRY_PAUSE_S)
