"""The HTTP application: the table of routes with their scopes. The server does not start if a route has no scope.

`server.py` builds the gateway, runs this application and owns the socket.
A route that takes a JSON body declares it as a model of `schemas`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tunesmith.core.errors import TunesmithError, quoted
from tunesmith.profiles.settings import ServeSettings
from tunesmith.serving.gateway import chat, control, feedback, models
from tunesmith.serving.gateway.access import AccessMiddleware, CallerFinder, error_response
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.bodies import JsonRequest, read_json
from tunesmith.serving.gateway.gateway import Gateway
from tunesmith.serving.gateway.scopes import Scope
from tunesmith.serving.gateway.validation import Body, validated

Handler = Callable[..., Awaitable[Response]]


class ScopedRoute(NamedTuple):
    method: str
    path: str
    scope: Scope
    handler: Handler


ROUTES = (
    ScopedRoute("POST", "/v1/chat/completions", Scope.CHAT, chat.chat_completions),
    ScopedRoute("POST", "/v1/completions", Scope.CHAT, chat.completions),
    ScopedRoute("GET", "/v1/models", Scope.READ, models.list_models),
    ScopedRoute("GET", "/v1/models/{model}", Scope.READ, models.get_model),
    ScopedRoute("POST", "/v1/feedback", Scope.FEEDBACK, feedback.feedback),
    ScopedRoute("GET", "/healthz", Scope.READ, models.health),
    ScopedRoute("GET", "/control/state", Scope.CONTROL, control.state),
    ScopedRoute("POST", "/control/load", Scope.CONTROL, control.load),
    ScopedRoute("POST", "/control/probe", Scope.CONTROL, control.probe),
    ScopedRoute("POST", "/control/flip", Scope.CONTROL, control.flip),
    ScopedRoute("POST", "/control/drain", Scope.CONTROL, control.drain),
    ScopedRoute("POST", "/control/unload", Scope.CONTROL, control.unload),
)


class BodyRoute(APIRoute):
    """Gives a handler the body that its signature declares, a model of `schemas`, read once within our limits.

    FastAPI would read a body of any size, depth and time, and name errors in its own way. A request of an application
    may carry an idempotency key; one that is refused frees its key.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        model = cast(type[Body], self.body_field.field_info.annotation)
        scope, endpoint = next((route.scope, route.handler) for route in ROUTES if route.path == self.path)

        async def handle(request: Request) -> Response:
            gateway: Gateway = request.app.state.gateway
            if scope is Scope.CHAT:
                gateway.refuse_while_ending()
            said = await read_json(request.headers, request.receive, gateway.settings.max_body_bytes)
            read = JsonRequest(request, said)
            if scope is Scope.CONTROL:
                return await endpoint(read, validated(model, said, self.path))
            with gateway.idempotency.entry(request.headers, self.path, said) as record:
                return record.answer or record.store(await endpoint(read, validated(model, said, self.path)))

        return handle


def make_app(gateway: Gateway, keys: CallerFinder) -> AccessMiddleware:
    """The application with its access control."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = BodyRoute
    app.state.gateway = gateway
    for route in ROUTES:
        app.add_api_route(route.path, route.handler, methods=[route.method], response_model=None)
    for kind in (TunesmithError, Exception):
        app.add_exception_handler(kind, error_response)
    app.add_exception_handler(HTTPException, http_exception_handler)
    return with_access_control(app, keys, allowed_host_names(gateway.settings), gateway.settings.allowed_origins)


def allowed_host_names(settings: ServeSettings) -> tuple[str, ...]:
    """The Host names that are accepted: serve.allowed_hosts, and serve.host unless it is a wildcard."""
    is_one = settings.host not in ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
    return (*settings.allowed_hosts, settings.host) if is_one else settings.allowed_hosts


async def http_exception_handler(request: Request, error: Exception) -> Response:
    """Format the errors of the HTTP router (unknown path or method) like all others."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    message = f"{error.detail}: {request.method} {quoted(request.url.path)}"
    return await error_response(request, ApiError(error.status_code, message, code=code))


def with_access_control(
    app: FastAPI, keys: CallerFinder, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()
) -> AccessMiddleware:
    scopes = {route.path: route.scope for route in ROUTES}
    return AccessMiddleware(app, app.routes, scopes, keys=keys, hosts=hosts, origins=origins)
