"""`/control/…`: the API that the `embedded` target calls on a running server, with the server's own token."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.serving.gateway.answers import JsonAnswer
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter
from tunesmith.serving.gateway.bodies import read_json
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.messages import check_messages
from tunesmith.serving.gateway.model_router import Route
from tunesmith.serving.gateway.models import refuse_query, state_of
from tunesmith.serving.names import ModelName, parse_model

_MAX_PROMPTS = 256
_MAX_DRAIN_S = 600.0


async def state(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    refuse_query(request)
    live_versions = gateway.router.live_versions()
    digests = {profile: version.digest for profile, version in live_versions.items()}
    return JsonAnswer({**state_of(gateway), "digests": digests, "loaded": gateway.engines.loaded()})


async def load(request: Request) -> Response:
    """Load a version of the store into its engine. The digest must be the one in the store."""
    gateway, said = await _said(request, {"profile": str, "name": str, "path": str, "digest": str})
    route = await _route(gateway, said)
    adapter = route.version.adapter
    if adapter is not None and said["digest"] != adapter.digest:
        raise invalid_parameter("digest", f"is not that of {adapter.name} in the store", "digest_mismatch")
    await gateway.hand_over.admit()
    await gateway.engines.load(route)
    return JsonAnswer({"name": route.version.name, "loaded": True})


async def probe(request: Request) -> Response:
    """Greedy answers of a version with tokens and log-probabilities, for the parity check."""
    gateway, said = await _said(request, {"profile": str, "name": str, "prompts": list, "max_tokens": int})
    if not 0 < len(said["prompts"]) <= _MAX_PROMPTS:
        raise invalid_parameter("prompts", f"must be a list of 1 to {_MAX_PROMPTS} conversations")
    prompts = [check_messages(prompt) for prompt in said["prompts"]]
    if not 0 < said["max_tokens"] <= gateway.settings.max_tokens:
        raise invalid_parameter("max_tokens", f"must be a number from 1 to {gateway.settings.max_tokens}")
    route = await _route(gateway, said)
    await gateway.hand_over.admit()
    with gateway.router.using(route.version.name):
        readings = await gateway.engines.read(route, prompts, said["max_tokens"])
    return JsonAnswer({"readings": [reading.model_dump(mode="json") for reading in readings]})


async def flip(request: Request) -> Response:
    """Read the store now; returns the version of the profile's alias afterwards."""
    gateway, said = await _said(request, {"profile": str})
    await gateway.router.refresh(at_once=True)
    profile = said["profile"]
    version = gateway.router.live_versions().get(profile)
    if version is None:
        raise ApiError(404, f"this server knows no profile {profile[:60]!r}", code="not_found", param="profile")
    trouble = gateway.router.problems.get(profile)
    if trouble is not None:
        raise ApiError(503, trouble, code="not_flipped", retry_after_s=1.0)
    live = None if version.adapter is None else {"name": version.name, "digest": version.adapter.digest}
    return JsonAnswer({"live": live})


async def drain(request: Request) -> Response:
    """Wait until no request uses a version."""
    gateway, said = await _said(request, {"name": str, "timeout_s": float})
    if not 0 <= said["timeout_s"] <= _MAX_DRAIN_S:
        raise invalid_parameter("timeout_s", f"must be a number from 0 to {_MAX_DRAIN_S:g}")
    if not await gateway.router.drained(said["name"], said["timeout_s"]):
        num = gateway.router.in_use().get(said["name"], 0)
        raise ApiError(504, f"{num} answers of {said['name'][:80]} are still written", code="not_drained")
    return JsonAnswer({"name": said["name"], "drained": True})


async def unload(request: Request) -> Response:
    gateway, said = await _said(request, {"name": str})
    if any(version.name == said["name"] for version in gateway.router.live_versions().values()):
        raise ApiError(422, f"{said['name'][:80]} is live, so it is not unloaded", code="is_live")
    await gateway.engines.unload(said["name"])
    return JsonAnswer({"name": said["name"], "unloaded": True})


async def _said(request: Request, kinds: dict[str, type]) -> tuple[Gateway, dict[str, Any]]:
    gateway: Gateway = request.app.state.gateway
    body = await read_json(request.headers, request.receive, gateway.settings.max_body_bytes)
    for name in {*body, *kinds}:
        if name not in kinds:
            raise invalid_parameter(
                name[:100], f"is unknown; {request.url.path} takes {', '.join(kinds)}", "unknown_parameter"
            )
        value = body.get(name)
        kind = (int, float) if kinds[name] is float else kinds[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise invalid_parameter(name, f"must be a {kinds[name].__name__}")
    return gateway, body


async def _route(gateway: Gateway, said: dict[str, Any]) -> Route:
    """The route of an exact version in the store."""
    name: ModelName = parse_model(said["name"])
    if name.profile != said["profile"] or name.is_live:
        raise invalid_parameter("name", "must be an exact version of the profile, such as support@v7")
    return await gateway.router.resolve(said["name"])
