"""`client.runs`: submit, look at, and steer runs. What only writing needs is imported there: looking stays quick."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.client.attempt_progress import AttemptProgress, read_progress
from tunesmith.client.held_runs import next_step
from tunesmith.client.views import (
    AttemptView,
    EvaluationView,
    EventView,
    PlannedRun,
    ProgressView,
    RequestResult,
    RunDetail,
    RunView,
    SubmittedView,
    shadow_of,
    to_json,
)
from tunesmith.core.errors import TunesmithError, UsageError, did_you_mean, quoted
from tunesmith.core.files import open_plain
from tunesmith.evaluation import queries as evaluations
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.models import queries as adapters
from tunesmith.programs.protocol import MAX_LINE
from tunesmith.runs.queries import queue, requests, runs, switches, tasks, workers
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.queries.tasks import Attempt
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RUN, Priority, RunState
from tunesmith.runs.rules.task import NEEDS_ROOM, STOPPED_BY_ESTOP, TaskState
from tunesmith.runs.session import Session, data_source
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.training.rules.estimate import QueueFacts, why_it_waits

if TYPE_CHECKING:
    from tunesmith.datasets.prepare import Progress
    from tunesmith.orchestration.submit import Submission

_MAX_LISTED = 10_000


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
        if not 1 <= limit <= _MAX_LISTED:
            raise UsageError(f"limit must be between 1 and {_MAX_LISTED}")
        states = None if state is None else frozenset({_state(state)})
        profile, no_room = self._session.known_profile(profile), self._session.no_room
        with self._session.database.read() as tx:
            return [_view(tx, run, no_room) for run in runs.listing(tx, profile=profile, states=states, limit=limit)]

    def get(self, run_id: str) -> RunView:
        with self._session.database.read() as tx:
            return _view(tx, runs.find(tx, run_id), self._session.no_room)

    def show(self, run_id: str) -> RunDetail:
        """Everything about one run: spec, attempts, evaluation, requests, history."""
        with self._session.database.read() as tx:
            run = runs.find(tx, run_id)
            kinds = {task.id: task.kind.value for task in queue.of_run(tx, run.id)}
            attempts = queue.attempts_of_run(tx, run.id)
            return RunDetail(
                run=_view(tx, run, self._session.no_room),
                spec=run.spec.model_dump(mode="json"),
                attempts=tuple(_attempt(attempt, kinds) for attempt in attempts),
                evaluation=_evaluation(tx, run.id),
                requests=tuple(to_json(request) for request in requests.of_run(tx, run.id)),
                events=tuple(
                    EventView(e.at, e.action, e.actor, e.old_state, e.new_state, e.reason)
                    for e in events.of_entity(tx, "run", run.id)
                ),
                shadow=shadow_of(tx, run),
                num_erased=erasures.num_since(tx, run.dataset_id, run.created_at),
                progress=self._attempt_progress(run.id, attempts),
                what_to_do=_what_to_do(tx, run),
            )

    def watch(self, run_id: str, *, interval_s: float = 0.5) -> Iterator[ProgressView]:
        """Where the run is, again and again until it has ended or waits for a person."""
        while True:
            progress = self.progress(run_id)
            yield progress
            if progress.is_over:
                return
            time.sleep(interval_s)

    def progress(self, run_id: str) -> ProgressView:
        with self._session.database.read() as tx:
            run = runs.find(tx, run_id)
            view = _view(tx, run, self._session.no_room)
            attempts = queue.attempts_of_run(tx, run.id)
            what_to_do = _what_to_do(tx, run)
        is_over = run.state in RUN.finished or run.state in (RunState.HELD, RunState.PAUSED)
        now = self._attempt_progress(run.id, attempts)
        seen = ProgressView(run.state, run.reason, view.waits_for, is_over=is_over, what_to_do=what_to_do)
        return seen if now is None else replace(seen, **vars(now))

    def _attempt_progress(self, run_id: str, attempts: Sequence[Attempt]) -> AttemptProgress | None:
        """Of the attempt that is open now; None where there is none."""
        if not attempts or attempts[-1].ended_at is not None:
            return None
        return read_progress(self._session.workspace.runs_dir / run_id / attempts[-1].id)

    def plan(self) -> Sequence[PlannedRun]:
        """Every unfinished run in the order workers will take them: what is under way first, then by priority."""
        session, no_room = self._session, self._session.no_room
        with session.database.read() as tx:
            found = runs.listing(tx, states=RUN.unfinished, limit=_MAX_LISTED)
            views = {run.id: _view(tx, run, no_room) for run in found}
        found.sort(key=lambda run: (run.state is RunState.QUEUED, run.priority, run.seq))
        return [_planned(session, run, views[run.id]) for run in found]

    def metrics(self, run_id: str) -> Sequence[dict[str, Any]]:
        """Every step's raw metrics over all attempts, in the order they were trained; validations too."""
        points: list[dict[str, Any]] = []
        for folder in self._attempt_dirs(run_id):
            for event in _events(folder / "events.jsonl"):
                kind, step, values = event.get("type"), event.get("step"), event.get("values")
                if kind in ("metrics", "validation") and isinstance(step, int) and isinstance(values, dict):
                    points.append({"attempt": folder.name, "type": kind, "step": step, **values})
        return points

    def logs(self, run_id: str, *, max_bytes: int = 64 << 10) -> str:
        """The end of what the programs of a run wrote to stderr, newest attempt last."""
        from tunesmith.programs.launch import tail_of_log

        tails = [(folder.name, tail_of_log(folder, max_bytes)) for folder in self._attempt_dirs(run_id)]
        return "\n".join(f"== {name}\n{tail}" for name, tail in tails if tail)

    def cancel(self, run_id: str) -> RequestResult:
        return self._request(run_id, RequestKind.CANCEL)

    def pause(self, run_id: str) -> RequestResult:
        return self._request(run_id, RequestKind.PAUSE)

    def stop(self, run_id: str, *, discard: bool = False) -> RequestResult:
        """End training now and evaluate the best so far; with `discard`, end without a result."""
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

        with self._session.database.read() as tx:
            old = runs.find(tx, run_id)
        if old.state not in RUN.finished:
            raise UsageError(f"run {old.id} is {old.state} and has not ended; nothing to try again")
        submission = Submission(
            profile=old.profile,
            data=old.dataset_id,
            overrides=overrides,
            priority=_priority(priority or _priority_name(old.priority)),
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

    def _attempt_dirs(self, run_id: str) -> Sequence[Path]:
        with self._session.database.read() as tx:
            run = runs.find(tx, run_id)
            ids = [attempt.id for attempt in queue.attempts_of_run(tx, run.id)]
        folders = [self._session.workspace.runs_dir / run.id / attempt_id for attempt_id in ids]
        return [folder for folder in folders if folder.is_dir()]


def _priority(text: str) -> Priority:
    try:
        return Priority(text)
    except ValueError:
        raise UsageError(f"no priority {quoted(text)}{did_you_mean(text, list(Priority))}") from None


def _priority_name(rank: int) -> str:
    return next(priority.value for priority in Priority if priority.rank == rank)


def _state(text: str) -> RunState:
    try:
        return RunState(text)
    except ValueError:
        raise UsageError(f"no run state {quoted(text)}{did_you_mean(text, list(RunState))}") from None


def _view(tx: Tx, run: Run, no_room: str | None) -> RunView:
    adapter = adapters.of_run(tx, run.id)
    return RunView(
        id=run.id,
        profile=run.profile,
        state=run.state,
        reason=run.reason,
        waits_for=_waits_for(tx, run, no_room),
        priority=_priority_name(run.priority),
        trainer=run.spec.trainer,
        method=run.spec.method,
        dataset_id=run.dataset_id,
        campaign_id=run.campaign_id,
        parent_id=run.parent_id,
        adapter=None if adapter is None else adapter.name,
        adapter_state=None if adapter is None else adapter.state,
        created_at=run.created_at,
        created_by=run.created_by,
        finished_at=run.finished_at,
    )


def _planned(session: Session, run: Run, view: RunView) -> PlannedRun:
    from tunesmith.orchestration.submit import estimate

    try:
        guess = estimate(session.database, session.workspace, run.spec)
    except TunesmithError:  # its dataset is damaged or gone, which training will say; a plan still lists it
        return PlannedRun(view, run.spec.dataset.num_train, None, "")
    return PlannedRun(view, run.spec.dataset.num_train, guess.seconds, guess.basis)


def _what_to_do(tx: Tx, run: Run) -> str | None:
    return next_step(tx, run) if run.state is RunState.HELD else None


def _waits_for(tx: Tx, run: Run, no_room: str | None) -> str | None:
    if run.state in RUN.finished:
        return None
    task = tasks.open_of_run(tx, run.id)
    estop = switches.is_on(tx, switches.ESTOP)
    kind = None if task is None else task.kind
    facts = QueueFacts(
        state=run.state,
        is_leased=task is not None and task.state is TaskState.LEASED,
        is_stopped_by_estop=estop and kind in STOPPED_BY_ESTOP,
        num_workers=sum(1 for worker in workers.alive(tx) if kind in worker.kinds),
        num_before=0 if task is None else queue.num_waiting_before(tx, task),
        backoff_s=0.0 if task is None else queue.seconds_until_due(tx, task.id),
        reason=run.reason if task is None else task.reason or run.reason,
        no_room=no_room if kind in NEEDS_ROOM else None,
    )
    return why_it_waits(facts)


def _attempt(attempt: tasks.Attempt, kinds: dict[str, str]) -> AttemptView:
    return AttemptView(
        id=attempt.id,
        task=kinds[attempt.task_id],
        number=attempt.number,
        outcome=attempt.state,
        error_class=attempt.error_class,
        error=attempt.error,
        worker_id=attempt.worker_id,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        result=attempt.result,
    )


def _evaluation(tx: Tx, run_id: str) -> EvaluationView | None:
    evaluation = evaluations.latest(tx, run_id)
    if evaluation is None:
        return None
    judged = evaluation.judged
    return EvaluationView(
        id=evaluation.id,
        decision=judged.verdict.decision,
        reasons=judged.verdict.reasons,
        num_cases=judged.report.num_cases,
        confidence=judged.report.confidence,
        comparisons=tuple(comparison.model_dump(mode="json") for comparison in judged.report.comparisons),
        evidence=judged.evidence.model_dump(mode="json"),
        scores_path=evaluation.scores_path,
        created_at=evaluation.created_at,
    )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of an event log; a line that is cut off or not JSON ends it."""
    try:
        with open_plain(path) as source:
            while line := source.readline(MAX_LINE + 1):
                if not line.endswith(b"\n"):
                    return
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event
    except (OSError, ValueError, RecursionError):
        return
