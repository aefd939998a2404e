"""A server behind a target, called over HTTP: what goes wrong there is the target's error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tunesmith.core.http import Http
from tunesmith.deployment.targets.base import TargetError

_POLL_S = 0.1


class TargetServer(Http):
    failed = TargetError


def wait_until_idle(name: str, timeout_s: float, servers: Iterable[tuple[str, Callable[[], bool]]]) -> None:
    """Wait until no server answers from a version. `servers`: how to name each one, and whether it answers now.

    Raises TargetError if one still does after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    for server, is_answering in servers:
        while is_answering():
            if time.monotonic() >= deadline:
                raise TargetError(f"{server} still answers from {name} after {timeout_s:g} s")
            time.sleep(_POLL_S)
