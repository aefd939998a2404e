"""`client.serving`: which servers run, and with what settings one would be started."""

from __future__ import annotations

from typing import Any

from tunesmith.profiles.resolve import resolve_settings
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.device.queries import servers
from tunesmith.programs.device.queries.servers import Server
from tunesmith.runs.session import Session


class Serving:
    def __init__(self, session: Session) -> None:
        self.session = session

    def settings_for(self, host: str | None = None, port: int | None = None) -> ServeSettings:
        """What tunesmith.yaml and the environment say, with what the caller says over it."""
        said: dict[str, Any] = {}
        if host is not None:
            said["serve.host"] = host
        if port is not None:
            said["serve.port"] = port
        return resolve_settings(self.session.workspace, self.session.environ, said).serve

    def list(self) -> list[Server]:
        """The servers that are alive, the oldest first."""
        with self.session.database.read() as tx:
            return servers.alive(tx)
