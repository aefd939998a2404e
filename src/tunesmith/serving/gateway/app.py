"""The HTTP application: every route with its scope, in one table; a route without one keeps it from starting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tunesmith.core.errors import TunesmithError, quoted
from tunesmith.profiles.settings import ServeSettings
from tunesmith.serving.gateway import chat, control, feedback, models
from tunesmith.serving.gateway.access import CallerFinder, Guard, error_response
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.scopes import Scope

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    method: str
    path: str
    scope: Scope
    handler: Handler


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", Scope.CHAT, chat.chat_completions),
    Endpoint("POST", "/v1/completions", Scope.CHAT, chat.completions),
    Endpoint("GET", "/v1/models", Scope.READ, models.list_models),
    Endpoint("GET", "/v1/models/{model}", Scope.READ, models.get_model),
    Endpoint("POST", "/v1/feedback", Scope.FEEDBACK, feedback.feedback),
    Endpoint("GET", "/healthz", Scope.READ, models.health),
    Endpoint("GET", "/control/state", Scope.CONTROL, control.state),
    Endpoint("POST", "/control/load", Scope.CONTROL, control.load),
    Endpoint("POST", "/control/probe", Scope.CONTROL, control.probe),
    Endpoint("POST", "/control/flip", Scope.CONTROL, control.flip),
    Endpoint("POST", "/control/drain", Scope.CONTROL, control.drain),
    Endpoint("POST", "/control/unload", Scope.CONTROL, control.unload),
)


def make_app(gateway: Gateway, keys: CallerFinder) -> Guard:
    """The application behind its guard."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    for endpoint in ENDPOINTS:
        app.add_api_route(endpoint.path, endpoint.handler, methods=[endpoint.method], response_model=None)
    for kind in (TunesmithError, Exception):
        app.add_exception_handler(kind, error_response)
    app.add_exception_handler(HTTPException, _nothing_here)
    return guarded(app, keys, names_of(gateway.settings), gateway.settings.allowed_origins)


def names_of(settings: ServeSettings) -> tuple[str, ...]:
    """As what it may be asked: also as the one that it listens on, where that is one."""
    is_one = settings.host not in ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
    return (*settings.allowed_hosts, settings.host) if is_one else settings.allowed_hosts


async def _nothing_here(request: Request, error: Exception) -> Response:
    """The router's own refusals (no such path, no such method) in our shape."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    message = f"{error.detail}: {request.method} {quoted(request.url.path)}"
    return await error_response(request, ApiError(error.status_code, message, code=code))


def guarded(app: FastAPI, keys: CallerFinder, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> Guard:
    scopes = {endpoint.path: endpoint.scope for endpoint in ENDPOINTS}
    return Guard(app, app.routes, scopes, keys=keys, hosts=hosts, origins=origins)
