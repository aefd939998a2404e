"""Errors as the OpenAI clients expect them: a status, and `{"error": {message, type, param, code}}`, all four keys."""

from __future__ import annotations

import math
from typing import Any

from tunesmith.core.errors import ConfigError, DataError, Refused, TunesmithError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
BAD_HTTP = "bad_http"
_SERVER_ERROR = 500
_CONFLICT = 409
_UNPROCESSABLE = 422


class ApiError(TunesmithError):
    """An error response; `param` names the invalid parameter, if there is one."""

    def __init__(
        self, http_status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


def invalid_parameter(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 for an invalid parameter; the message begins with its name."""
    return ApiError(400, f"{param} {message}", code=code, param=param)


def error_body(error: Exception, *, is_internal: bool = False) -> dict[str, Any]:
    """The OpenAI error body; unexpected exceptions give a generic message.

    `is_internal`: the caller is part of this workspace, so the message may contain local details.
    """
    known = error if isinstance(error, TunesmithError) else None
    message = known.message if known else "internal server error; see the server log"
    if not is_internal:
        message = getattr(error, "public", None) or message
    code = known.code if known else "internal"
    kind = _TYPES.get(status_of(error), "invalid_request_error" if status_of(error) < _SERVER_ERROR else "server_error")
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}}


def status_of(error: Exception) -> int:
    """The HTTP status. A conflict is 422, not 409: OpenAI clients retry a 409, which would fail again."""
    if isinstance(error, Refused | DataError | ConfigError):
        return _UNPROCESSABLE
    if isinstance(error, TunesmithError):
        return _UNPROCESSABLE if error.http_status == _CONFLICT else error.http_status
    return _SERVER_ERROR


def headers_of(error: Exception) -> list[tuple[bytes, bytes]]:
    """Retry-After, WWW-Authenticate and Connection headers of an error."""
    headers = []
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))
    if status_of(error) == 401:
        headers.append((b"www-authenticate", b'Bearer realm="tunesmith"'))
    if status_of(error) in (413, 408) or getattr(error, "code", None) == BAD_HTTP:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return headers
