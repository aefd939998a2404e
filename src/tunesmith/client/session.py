"""What every noun of the client shares: the workspace, its settings, the open store, and who is asking."""

from __future__ import annotations

import getpass
import json
from collections.abc import Mapping
from functools import cached_property

from tunesmith.config.resolve import resolve_settings
from tunesmith.config.workspace import Workspace
from tunesmith.errors import StoreError
from tunesmith.files import sha256_text, write_atomic
from tunesmith.settings import Settings
from tunesmith.store.database import Database
from tunesmith.store.schema import open_store


class Session:
    def __init__(self, workspace: Workspace, actor: str | None, environ: Mapping[str, str] | None) -> None:
        self.workspace = workspace
        self.environ = environ
        self.actor = actor or _user()
        self._database: Database | None = None

    @cached_property
    def settings(self) -> Settings:
        return resolve_settings(self.workspace, self.environ)

    @property
    def store_url(self) -> str:
        return self.settings.store.url or f"sqlite:///{self.workspace.store_file}"

    @property
    def database(self) -> Database:
        """Opened at first use. A store that was made once is never made again: gone or empty is an error."""
        if self._database is None:
            self._database = self._open()
        return self._database

    def _open(self) -> Database:
        marker = self.workspace.data_dir / "store.json"
        name = sha256_text(self.store_url)
        try:
            known = json.loads(marker.read_text()) if marker.exists() else []
            self.workspace.data_dir.mkdir(exist_ok=True)
            database = open_store(self.store_url, create=name not in known)
            if name not in known:
                write_atomic(marker, json.dumps([*known, name]))
        except (OSError, ValueError) as error:
            raise StoreError(f"{marker} cannot be read or written: {error}") from error
        return database

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _user() -> str:
    try:
        return f"user:{getpass.getuser()}"
    except (OSError, KeyError):
        return "user:unknown"
