"""`/v1/models` and `/healthz`: what can be asked for, and how the server is."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunesmith.serving.gateway.access import caller_of
from tunesmith.serving.gateway.answers import JsonAnswer
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.model_router import ModelVersion
from tunesmith.serving.gateway.scopes import Scope
from tunesmith.serving.names import BASE

_OWNER = "tunesmith"


async def list_models(request: Request) -> Response:
    """Each profile by its name, what that means now, and its bare base."""
    gateway: Gateway = request.app.state.gateway
    refuse_query(request)
    found: dict[str, dict[str, Any]] = {}
    for profile, version in gateway.router.live_versions().items():
        found[profile] = _model(profile, version)
        found[version.name] = _model(version.name, version)
        found.setdefault(f"{profile}@{BASE}", _model(f"{profile}@{BASE}", ModelVersion(f"{profile}@{BASE}")))
    return JsonAnswer({"object": "list", "data": list(found.values())})


async def get_model(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    refuse_query(request)
    name = request.path_params["model"]
    route = await gateway.route_for(name, caller_of(request))
    return JsonAnswer(_model(name, route.version))


async def health(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    refuse_query(request)
    state = state_of(gateway)
    if not caller_of(request).may(Scope.CONTROL):  # what is wrong with a profile's file quotes the file
        files = gateway.router.file_problems
        told = "its file cannot be used; run `tunesmith profile check` where it is served"
        state["problems"] = {name: told if name in files else why for name, why in state["problems"].items()}
        if state["capture"]["last_problem"] is not None:
            state["capture"]["last_problem"] = "the server's log says what could not be kept, and why"
    return JsonAnswer(state)


def state_of(gateway: Gateway) -> dict[str, Any]:
    """Which version each profile's name means, and what is wrong."""
    router = gateway.router
    lost = router.store_health.problem
    is_degraded = bool(lost or router.problems or gateway.engines.problems)
    return {
        "status": "stopping" if gateway.is_ending else "degraded" if is_degraded else "ok",
        "server": gateway.server_id,
        "state": str(gateway.hand_over.state),
        "serving": {profile: version.name for profile, version in router.live_versions().items()},
        "engines": gateway.engines.state(),
        "in_use": router.in_use(),
        "store": lost or "ok",
        "problems": router.problems,
        "counts": dict(gateway.counts),
        "capture": gateway.captures.counts(),
    }


def refuse_query(request: Request) -> None:
    """No listing here takes parameters; one that is sent all the same would be silently ignored."""
    for name in request.query_params:
        message = f"{request.url.path} takes no parameter {name[:60]!r}"
        raise ApiError(400, message, code="unknown_parameter", param=name[:100])


def _model(name: str, version: ModelVersion) -> dict[str, Any]:
    created = 0 if version.created_at is None else int(version.created_at.timestamp())
    return {"id": name, "object": "model", "created": created, "owned_by": _OWNER, "root": version.name}
