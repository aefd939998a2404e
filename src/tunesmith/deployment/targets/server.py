"""A server behind a target, called over HTTP: what goes wrong there is the target's error."""

from __future__ import annotations

from tunesmith.core.http import Http
from tunesmith.deployment.targets.base import TargetError


class TargetServer(Http):
    failed = TargetError
