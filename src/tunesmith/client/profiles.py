"""`client.profiles`: list, check, plan, lock, and explain where each setting comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.core.errors import UsageError
from tunesmith.datasets.prepare import Progress
from tunesmith.experience.assemble import preview
from tunesmith.orchestration.check import check
from tunesmith.orchestration.plan import RunPlan, plan_run
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.resolve import ExplainedKey, ProfileEntry, Resolved, explain, list_profiles, resolve_now
from tunesmith.profiles.rules.lock import ProfileLock, check_lock
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.session import Session, data_source

if TYPE_CHECKING:
    from tunesmith.orchestration.dry_run import DryRun


class Profiles:
    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self) -> list[ProfileEntry]:
        return list_profiles(self._session.workspace, self._session.environ)

    def show(self, name: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> tuple[Resolved, ProfileLock | None]:
        """The profile as it holds now, and its lock if it has one."""
        session = self._session
        with session.database.read() as tx:
            locked = profiles.lock_of(tx, name)
        resolved, _ = resolve_now(
            session.database, session.workspace, name, overrides=overrides, environ=session.environ
        )
        return resolved, locked

    def explain(
        self, name: str, key: str | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
    ) -> Sequence[ExplainedKey]:
        """Every setting that holds for the profile, and who said it."""
        resolved, _ = self.show(name, overrides)
        return explain(resolved, key)

    def check(self, name: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> CheckedProfile:
        """Everything that is checked before a run is queued; raises with every problem."""
        session = self._session
        checked, _, _ = check(session.database, session.workspace, name, overrides=overrides, environ=session.environ)
        return checked

    def plan(
        self,
        name: str,
        data: str | Path | Sequence[Path] | None = None,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        on_progress: Progress | None = None,
    ) -> RunPlan:
        """What a run would be, without queueing it; raises what would be refused. `data`: a dataset id, or files."""
        session = self._session
        source = None if data is None else data_source(data)
        return plan_run(
            session.database,
            session.workspace,
            name,
            source,
            overrides=overrides,
            environ=session.environ,
            on_progress=on_progress,
        )

    def dry_run(
        self,
        name: str,
        data: str | Path | Sequence[Path] | None = None,
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        start: Literal["live", "base"] = "live",
        on_progress: Progress | None = None,
    ) -> DryRun:
        """Everything that a run on this data would be refused or fail for before its first step; raises it.

        Queues, records and reserves nothing, and needs no worker. `data` is what `runs.submit` takes.
        """
        from tunesmith.orchestration.dry_run import dry_run
        from tunesmith.orchestration.submit import Submission

        source = None if data is None else data_source(data)
        session, submission = self._session, Submission(name, source, overrides, start=start)
        return dry_run(
            session.database,
            session.workspace,
            submission,
            actor=session.actor,
            environ=session.environ,
            on_progress=on_progress,
        )

    def lock(self, name: str, *, new_split: bool = False, reason: str = "") -> ProfileLock:
        """Read the base model's facts once and lock them; locking again changes nothing.

        `new_split`: split new prompts by the shares that the profile says now. What was trained on or held out before
        keeps its split. Needs a reason, which is kept in the history.
        """
        session = self._session
        if not new_split:
            checked = self.check(name)
            with session.database.write() as tx:
                return profiles.lock(tx, name, checked.lock, actor=session.actor)
        if not reason.strip():
            raise UsageError("changing the split needs a reason, which is kept in the history; give one (--reason)")
        checked, _, _ = check(session.database, session.workspace, name, new_split=True, environ=session.environ)
        with session.database.write() as tx:
            check_lock(name, profiles.lock(tx, name, checked.lock, actor=session.actor), checked.lock, new_split=True)
            return profiles.change_split(tx, name, checked.lock, actor=session.actor, reason=reason.strip())

    def heldout_warning(self, name: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> str | None:
        """Why a run on the profile's experiences would be held for too few cases, and what to set; None: enough."""
        return preview(self._session.database, self._session.workspace, self.check(name, overrides)).warning
