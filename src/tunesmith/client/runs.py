"""`client.runs`: submit, look at, and steer runs.

Imports that only one method needs are inside it, so that listings start quickly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.client.views import (
    MAX_LISTED,
    PlannedRun,
    ProgressView,
    RequestResult,
    RunDetail,
    RunView,
    SubmittedView,
)
from tunesmith.core.errors import UsageError, did_you_mean, quoted
from tunesmith.models import listings
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RUN, Priority, RunState
from tunesmith.runs.session import Session, data_source

if TYPE_CHECKING:
    from tunesmith.datasets.prepare import Progress
    from tunesmith.orchestration.submit import Submission
    from tunesmith.store.reader import Reader


class Runs:
    def __init__(self, session: Session) -> None:
        self._session = session

    def submit(  # noqa: PLR0913 - the options of one wish, by keyword
        self,
        profile: str,
        data: str | Path | Sequence[Path] | None = None,
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        priority: str = "normal",
        start: Literal["live", "base"] = "live",
        dry_run: bool = False,
        idempotency_key: str | None = None,
        parent_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        on_progress: Progress | None = None,
    ) -> SubmittedView:
        """Queue a run on a dataset id, on files, or on what is assembled from experiences where `data` is None.

        Returns once it is durable.
        """
        from tunesmith.orchestration.submit import Submission

        submission = Submission(
            profile=profile,
            data=None if data is None else data_source(data),
            overrides=overrides,
            priority=_priority(priority),
            start=start,
            dry_run=dry_run,
            idempotency_key=idempotency_key,
            parent_id=parent_id,
            metadata=metadata or {},
        )
        return self._submit(submission, on_progress)

    def _submit(self, submission: Submission, on_progress: Progress | None = None) -> SubmittedView:
        from tunesmith.orchestration.submit import submit

        session = self._session
        made = submit(
            session.database,
            session.workspace,
            submission,
            actor=session.actor,
            environ=session.environ,
            on_progress=on_progress,
        )
        return SubmittedView(
            id=made.run_id,
            dataset_id=made.dataset_id,
            estimate_s=made.estimate.seconds,
            estimate_basis=made.estimate.basis,
            waits_for=self.get(made.run_id).waits_for,
            is_new=made.is_new,
            warning=made.warning,
            memory=made.memory,
        )

    def list(self, *, profile: str | None = None, state: str | None = None, limit: int = 50) -> list[RunView]:
        """The newest first."""
        return list(self.page(profile=profile, state=state, limit=limit)[0])

    def page(
        self, *, profile: str | None = None, state: str | None = None, limit: int = 50
    ) -> tuple[Sequence[RunView], int]:
        """The newest first, and how many there are in all."""
        if not 1 <= limit <= MAX_LISTED:
            raise UsageError(f"limit must be between 1 and {MAX_LISTED}")
        states = None if state is None else frozenset({_state(state)})
        profile, no_room = self._session.known_profile(profile), self._session.no_room

        def look(reader: Reader) -> tuple[Sequence[RunView], int]:
            found = listings.runs(reader, profile=profile, states=states, limit=limit, no_room=no_room)
            return found, len(found) if len(found) < limit else listings.num_runs(
                reader, profile=profile, states=states
            )

        return self._session.look(look)

    def get(self, run_id: str) -> RunView:
        from tunesmith.client import one_run

        return one_run.view(self._session, run_id)

    def show(self, run_id: str) -> RunDetail:
        """Everything about one run: spec, attempts, evaluation, requests, history."""
        from tunesmith.client import one_run

        return one_run.detail(self._session, run_id)

    def watch(self, run_id: str, *, interval_s: float = 0.5) -> Iterator[ProgressView]:
        """Where the run is, again and again until it has ended or waits for a person."""
        while True:
            progress = self.progress(run_id)
            yield progress
            if progress.is_over:
                return
            time.sleep(interval_s)

    def progress(self, run_id: str) -> ProgressView:
        from tunesmith.client import one_run

        return one_run.progress(self._session, run_id)

    def plan(self) -> Sequence[PlannedRun]:
        """Every unfinished run in the order workers will take them: what is under way first, then by priority."""
        from tunesmith.client import one_run

        return one_run.plan(self._session, MAX_LISTED)

    def metrics(self, run_id: str) -> Sequence[dict[str, Any]]:
        """Every step's raw metrics over all attempts, in the order they were trained; validations too."""
        from tunesmith.client import one_run

        return one_run.metrics(self._session, run_id)

    def logs(self, run_id: str, *, max_bytes: int = 64 << 10) -> str:
        """The end of what the programs of a run wrote to stderr, newest attempt last."""
        from tunesmith.client import one_run

        return one_run.logs(self._session, run_id, max_bytes)

    def cancel(self, run_id: str) -> RequestResult:
        return self._request(run_id, RequestKind.CANCEL)

    def pause(self, run_id: str) -> RequestResult:
        return self._request(run_id, RequestKind.PAUSE)

    def stop(self, run_id: str, *, discard: bool = False) -> RequestResult:
        """End training now and evaluate the best so far; with `discard`, end without a result.

        A watch ends, and what is live stays.
        """
        return self._request(run_id, RequestKind.CANCEL if discard else RequestKind.STOP)

    def skip(self, run_id: str) -> RequestResult:
        return self._request(run_id, RequestKind.SKIP)

    def checkpoint(self, run_id: str) -> RequestResult:
        return self._request(run_id, RequestKind.CHECKPOINT)

    def resume(self, run_id: str) -> RequestResult:
        from tunesmith.orchestration import control

        with self._session.database.write() as tx:
            answer = control.resume(tx, run_id, actor=self._session.actor)
        return RequestResult(answer.run_id, answer.state, answer.message)

    def retry(
        self,
        run_id: str,
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        priority: str | None = None,
        start: Literal["same", "live", "base"] = "same",
    ) -> SubmittedView:
        """Open a new run like a finished one: its dataset, its start, its priority, and everything it was told.

        `overrides` come on top. What the files of profile and workspace say is read again. The old run is its parent.
        """
        from tunesmith.orchestration.submit import Submission
        from tunesmith.runs.queries import runs

        with self._session.database.read() as tx:
            old = runs.find(tx, run_id)
        if old.state not in RUN.finished:
            raise UsageError(f"run {old.id} is {old.state} and has not ended; nothing to try again")
        submission = Submission(
            profile=old.profile,
            data=old.dataset_id,
            overrides=overrides,
            priority=_priority(priority or Priority.of_rank(old.priority).value),
            start=start,
            dry_run=old.spec.dry_run,
            parent_id=old.id,
            repeats=old.spec,
            metadata=old.spec.metadata,
        )
        return self._submit(submission)

    def _request(self, run_id: str, kind: RequestKind) -> RequestResult:
        from tunesmith.orchestration import control

        with self._session.database.write() as tx:
            answer = control.request_action(tx, run_id, kind, actor=self._session.actor)
        return RequestResult(answer.run_id, answer.state, answer.message, answer.request_id)


def _priority(text: str) -> Priority:
    try:
        return Priority(text)
    except ValueError:
        raise UsageError(f"no priority {quoted(text)}{did_you_mean(text, list(Priority))}") from None


def _state(text: str) -> RunState:
    try:
        return RunState(text)
    except ValueError:
        raise UsageError(f"no run state {quoted(text)}{did_you_mean(text, list(RunState))}") from None
