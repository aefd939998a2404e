"""The one door for the edges: `Client(workspace)`, with a noun for each thing and a verb for each action.

client = Client()
run = client.runs.submit("dates", data="examples.jsonl")
for progress in client.runs.watch(run.id): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tunesmith.client.adapters import Adapters
from tunesmith.client.campaigns import Campaigns
from tunesmith.client.datasets import Datasets
from tunesmith.client.profiles import Profiles
from tunesmith.client.runs import Runs
from tunesmith.client.session import Session
from tunesmith.client.system import System
from tunesmith.config.workspace import Workspace, find_workspace, init_workspace

__all__ = ["Client"]


class Client:
    """A local client: works on the workspace's store and files directly."""

    def __init__(
        self,
        workspace: str | Path | None = None,
        *,
        actor: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        explicit = None if workspace is None else Path(workspace)
        self._session = Session(find_workspace(explicit=explicit, environ=environ), actor, environ)
        self.runs = Runs(self._session)
        self.datasets = Datasets(self._session)
        self.adapters = Adapters(self._session)
        self.profiles = Profiles(self._session)
        self.campaigns = Campaigns(self._session)
        self.system = System(self._session)

    @classmethod
    def init(cls, folder: str | Path = ".", *, actor: str | None = None) -> Client:
        """Make a workspace with an empty store, and a client for it."""
        workspace = init_workspace(Path(folder))
        client = cls(workspace.root, actor=actor)
        client._session.database  # noqa: B018 - opening it creates the store
        return client

    @property
    def workspace(self) -> Workspace:
        return self._session.workspace

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
