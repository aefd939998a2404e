"""The public Python API: `Client(workspace)`, with a resource for each thing and a method for each action.

client = Client()
run = client.runs.submit("dates", data="examples.jsonl")
for progress in client.runs.watch(run.id): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tunesmith.profiles.workspace import Workspace, find_workspace, init_workspace
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.client.adapters import Adapters
    from tunesmith.client.campaigns import Campaigns
    from tunesmith.client.curriculum import Curriculum
    from tunesmith.client.datasets import Datasets
    from tunesmith.client.experiences import Experiences, FeedbackApi
    from tunesmith.client.file_drop import FileDrops
    from tunesmith.client.gate import Gate
    from tunesmith.client.lineage import Lineage
    from tunesmith.client.profiles import Profiles
    from tunesmith.client.runs import Runs
    from tunesmith.client.serving import Serving
    from tunesmith.client.system import System
    from tunesmith.experience.capture_queue import CaptureQueue
    from tunesmith.profiles.checks import CheckedProfile
    from tunesmith.store.database import Database
    from tunesmith.store.lock_holder import Patience

__all__ = ["Client"]


def _check_profile(
    database: Database, workspace: Workspace, profile: str, *, environ: Mapping[str, str] | None
) -> CheckedProfile:
    """Trainers and targets are imported only where a profile is checked, so that listings stay quick."""
    from tunesmith.orchestration.check import check_now

    return check_now(database, workspace, profile, environ=environ)


class Client:
    """A local client: works on the workspace's store and files directly. Each resource is loaded on first use."""

    def __init__(
        self,
        workspace: str | Path | None = None,
        *,
        actor: str | None = None,
        environ: Mapping[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`patience`: how long a write waits while another process holds a SQLite store's lock; else a minute."""
        explicit = None if workspace is None else Path(workspace)
        self._session = Session(
            find_workspace(explicit=explicit, environ=environ), actor, environ, _check_profile, patience
        )

    @cached_property
    def runs(self) -> Runs:
        from tunesmith.client.runs import Runs

        return Runs(self._session)

    @cached_property
    def datasets(self) -> Datasets:
        from tunesmith.client.datasets import Datasets

        return Datasets(self._session)

    @cached_property
    def adapters(self) -> Adapters:
        from tunesmith.client.adapters import Adapters

        return Adapters(self._session)

    @cached_property
    def gate(self) -> Gate:
        from tunesmith.client.gate import Gate

        return Gate(self._session)

    @cached_property
    def lineage(self) -> Lineage:
        from tunesmith.client.lineage import Lineage

        return Lineage(self._session)

    @cached_property
    def profiles(self) -> Profiles:
        from tunesmith.client.profiles import Profiles

        return Profiles(self._session)

    @cached_property
    def campaigns(self) -> Campaigns:
        from tunesmith.client.campaigns import Campaigns

        return Campaigns(self._session)

    @cached_property
    def file_drops(self) -> FileDrops:
        from tunesmith.client.file_drop import FileDrops

        return FileDrops(self._session)

    @cached_property
    def experiences(self) -> Experiences:
        from tunesmith.client.experiences import Experiences

        return Experiences(self._session)

    @cached_property
    def curriculum(self) -> Curriculum:
        from tunesmith.client.curriculum import Curriculum

        return Curriculum(self._session)

    @cached_property
    def feedback(self) -> FeedbackApi:
        from tunesmith.client.experiences import FeedbackApi

        return FeedbackApi(self._session, self._flush_captures)

    @cached_property
    def capture(self) -> CaptureQueue:
        """`client.capture(profile, messages, …)` from inside an application: queued, never in its way."""
        from tunesmith.experience.capture_queue import CaptureQueue

        return CaptureQueue(self._session)

    def _flush_captures(self, timeout_s: float) -> None:
        if "capture" in self.__dict__:  # only where it was ever used
            self.capture.flush(timeout_s)

    @cached_property
    def serving(self) -> Serving:
        from tunesmith.client.serving import Serving

        return Serving(self._session)

    @cached_property
    def system(self) -> System:
        from tunesmith.client.system import System

        return System(self._session)

    @classmethod
    def init(
        cls,
        folder: str | Path = ".",
        *,
        base: str | Path | None = None,
        task: str | None = None,
        role: str | None = None,
        tier: str | None = None,
        campaign: bool = True,
        actor: str | None = None,
    ) -> Client:
        """Make a workspace with an empty store, and a client for it.

        With `base` (a folder, the id of a model on a hub, or `smollm2`) and `task`, also write the profile
        profiles/TASK.yaml and open its campaign; where a workspace is already, only these. All is made, or nothing.
        """
        if base is not None or task is not None:
            from tunesmith.client.start import start, wish_of

            wish = wish_of(base, task, role, tier, with_campaign=campaign)
            return start(Path(folder), wish, lambda root: cls(root, actor=actor))[0]
        workspace = init_workspace(Path(folder))
        client = cls(workspace.root, actor=actor)
        client._session.database  # noqa: B018 - opening it creates the store
        return client

    @property
    def workspace(self) -> Workspace:
        return self._session.workspace

    def close(self) -> None:
        if "capture" in self.__dict__:  # only where it was ever used
            self.capture.close()
        self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
