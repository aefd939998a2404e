"""`/control/…`: the API that the `embedded` target calls on a running server, with the server's own token."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.serving.gateway.answers import JsonAnswer
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.models import refuse_query, state_of
from tunesmith.serving.gateway.schemas import DrainBody, FlipBody, LoadBody, ProbeBody, UnloadBody
from tunesmith.serving.names import ModelName, parse_model


async def state(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    refuse_query(request)
    live_versions = gateway.router.live_versions()
    digests = {profile: version.digest for profile, version in live_versions.items()}
    return JsonAnswer({**state_of(gateway), "digests": digests, "loaded": gateway.engines.loaded()})


async def load(request: Request, body: LoadBody) -> Response:
    """Load a version of the store into its engine. The digest must be the one in the store."""
    gateway: Gateway = request.app.state.gateway
    route = await _route(gateway, body.profile, body.name)
    adapter = route.version.adapter
    if adapter is not None and body.digest != adapter.digest:
        raise invalid_parameter("digest", f"is not that of {adapter.name} in the store", "digest_mismatch")
    await gateway.hand_over.admit()
    await gateway.engines.load(route)
    return JsonAnswer({"name": route.version.name, "loaded": True})


async def probe(request: Request, body: ProbeBody) -> Response:
    """Greedy answers of a version with tokens and log-probabilities, for the parity check."""
    gateway: Gateway = request.app.state.gateway
    if not 0 < body.max_tokens <= gateway.settings.max_tokens:
        raise invalid_parameter("max_tokens", f"must be a number from 1 to {gateway.settings.max_tokens}")
    route = await _route(gateway, body.profile, body.name)
    await gateway.hand_over.admit()
    with gateway.router.using(route.version.name):
        readings = await gateway.engines.probe(route, body.prompts, body.max_tokens)
    return JsonAnswer({"readings": [reading.model_dump(mode="json") for reading in readings]})


async def flip(request: Request, body: FlipBody) -> Response:
    """Read the store now; returns the version of the profile's alias afterwards."""
    gateway: Gateway = request.app.state.gateway
    await gateway.router.refresh(at_once=True)
    profile = body.profile
    version = gateway.router.live_versions().get(profile)
    if version is None:
        raise ApiError(404, f"this server knows no profile {profile[:60]!r}", code="not_found", param="profile")
    trouble = gateway.router.problems.get(profile)
    if trouble is not None:
        raise ApiError(503, trouble, code="not_flipped", retry_after_s=1.0)
    live = None if version.adapter is None else {"name": version.name, "digest": version.adapter.digest}
    return JsonAnswer({"live": live})


async def drain(request: Request, body: DrainBody) -> Response:
    """Wait until no request uses a version."""
    gateway: Gateway = request.app.state.gateway
    if not await gateway.router.drained(body.name, body.timeout_s):
        num = gateway.router.in_use().get(body.name, 0)
        raise ApiError(504, f"{num} answers of {body.name[:80]} are still written", code="not_drained")
    return JsonAnswer({"name": body.name, "drained": True})


async def unload(request: Request, body: UnloadBody) -> Response:
    gateway: Gateway = request.app.state.gateway
    if any(version.name == body.name for version in gateway.router.live_versions().values()):
        raise ApiError(422, f"{body.name[:80]} is live, so it is not unloaded", code="is_live")
    await gateway.engines.unload(body.name)
    return JsonAnswer({"name": body.name, "unloaded": True})


async def _route(gateway: Gateway, profile: str, version: str) -> Route:
    """The route of an exact version in the store."""
    name: ModelName = parse_model(version)
    if name.profile != profile or name.is_live:
        raise invalid_parameter("name", "must be an exact version of the profile, such as support@v7")
    return await gateway.router.resolve(version)
