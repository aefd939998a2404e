"""`client.serving`: which servers run, and with what settings one would be started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.profiles.base_model import MODEL_CONFIG, weights_path
from tunesmith.profiles.resolve import resolve_settings
from tunesmith.profiles.session import Session
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.device.queries import servers
from tunesmith.programs.device.queries.servers import Server


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


def base_problem(base: Path) -> str | None:
    """Why a base model could not be loaded, as far as a glance tells; None: it looks whole."""
    if not base.is_dir():
        return f"its base model, the folder {base.name}, is missing; put it back, or set base.path"
    if not (base / MODEL_CONFIG).is_file():
        return f"its base model, the folder {base.name}, has no {MODEL_CONFIG}; put it back"
    return None


def version_problem(name: str, folder: Path) -> str | None:
    """The same for the folder of an adapter, or of a fully tuned model."""
    if not folder.is_dir():
        return f"the folder of {name} ({folder.name}) is missing; restore it from a backup, or roll back"
    if not weights_path(folder).is_file():
        return f"the folder of {name} ({folder.name}) has no {weights_path(folder).name}; restore it, or roll back"
    return None
