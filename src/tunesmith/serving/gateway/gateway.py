"""The gateway as its routes see it: settings, switchboard, engines, captures, and who else looks at requests."""

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
from tunesmith.serving.gateway.admission import Pace
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.captures import Captures
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.engines import EnginePool
from tunesmith.serving.gateway.idempotency import Repeats
from tunesmith.serving.gateway.interfaces import HandOver, Shadow, Upstream
from tunesmith.serving.gateway.model_router import Route, Switchboard
from tunesmith.serving.gateway.scopes import Caller, Scope
from tunesmith.serving.gateway.served_profiles import Place
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

_BAD_REQUEST = 400
_GIVEN_AWAY = frozenset({"aside", "engine_stopped"})
"""The device was given to a training between the moment that we were let in and the first word."""
_PASSING = frozenset({*_GIVEN_AWAY, "busy", "engine_died", "engine_hung", "engines_in_use", "in_use", "no_room"})
"""What goes by itself, so it says nothing about the version that was asked."""
_AGAIN_S = 0.05
_PROVED = frozenset({AdapterState.LIVE, AdapterState.SUPERSEDED})
"""Versions that any key with the scope `chat` may ask for by name."""


@dataclass
class Gateway:
    server_id: str
    session: Session
    settings: ServeSettings
    switchboard: Switchboard
    engines: EnginePool
    captures: Captures
    hand_over: HandOver
    shadow: Shadow
    make_upstream: Callable[[Place], Upstream]
    upstreams: dict[str, Upstream] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    repeats: Repeats = field(default_factory=Repeats)
    feedback_pace: Pace = field(init=False)
    is_ending: bool = False
    num_rating: int = 0
    """Feedback that is being stored now."""

    def __post_init__(self) -> None:
        self.feedback_pace = Pace(self.settings.max_feedback_per_minute)

    def refuse_while_ending(self) -> None:
        if self.is_ending:
            raise ApiError(503, "the server is stopping; ask another one, or later", code="stopping", retry_after_s=5.0)

    async def route_for(self, model: str, caller: Caller) -> Route:
        """Where a caller's request goes; raises 404, which is the same for a version that is not there and one that
        never went live or was taken back, where the caller may not ask for such."""
        if caller.may(Scope.ANY_VERSION) or "@v" not in model:
            return await self.switchboard.resolve(model)
        with suppress(ApiError):
            route = await self.switchboard.resolve(model)
            if route.version.state in _PROVED:
                return route
        message = (
            f"no model {quoted(model)} that this API key may ask for; "
            "a version that never went live, or was taken back, "
            "needs a key with the scope any_version. GET /v1/models lists what is live"
        )
        raise ApiError(404, message, code="model_not_found", param="model")

    def upstream_of(self, place: Place) -> Upstream:
        """Who answers for a profile that the embedded engine does not serve; made when first asked."""
        key = canonical_json([place.profile, place.target.model_dump(mode="json")])
        if key not in self.upstreams:
            self.upstreams[key] = self.make_upstream(place)
        return self.upstreams[key]

    async def generate(self, route: Route, asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """One answer of the embedded engine, once the device is ours; asked again if it was given away meanwhile."""
        while True:
            await self.hand_over.admit()
            has_begun = False
            try:
                async with aclosing(self.engines.generate(route, asked)) as parts:
                    async for part in parts:
                        if not has_begun:
                            self.switchboard.note(route.version.name, None)
                        has_begun = True
                        yield part
                return
            except EngineError as error:
                if not has_begun and error.code not in _PASSING and error.http_status != _BAD_REQUEST:
                    self.switchboard.note(route.version.name, error.public or error.message)
                if has_begun or self.is_ending or error.code not in _GIVEN_AWAY:
                    raise
            await asyncio.sleep(_AGAIN_S)
