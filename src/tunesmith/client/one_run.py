"""Everything about one run: its page, how far it has come, its metrics and logs; and the plan of those that wait."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.client.attempt_progress import AttemptProgress, read_progress
from tunesmith.client.evaluation_view import evaluation_view
from tunesmith.client.held_runs import next_step
from tunesmith.client.views import (
    AttemptView,
    EventView,
    PlannedRun,
    ProgressView,
    RunDetail,
    RunView,
    ShadowView,
    to_json,
)
from tunesmith.core.errors import TunesmithError
from tunesmith.core.files import open_plain
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.listings import held
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.models import listings
from tunesmith.programs.protocol import MAX_LINE
from tunesmith.runs.queries import queue, requests, runs
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.queries.tasks import Attempt
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.session import Session
from tunesmith.store import events
from tunesmith.store.database import Tx

_NO_SHADOW = shadows.Progress(0, 0, 0, 0, 0, None, None, None)


def view(session: Session, run_id: str) -> RunView:
    with session.database.read() as tx:
        return _view(tx, runs.find(tx, run_id), session)


def detail(session: Session, run_id: str) -> RunDetail:
    with session.database.read() as tx:
        run = runs.find(tx, run_id)
        kinds = {task.id: task.kind.value for task in queue.of_run(tx, run.id)}
        attempts = queue.attempts_of_run(tx, run.id)
        history = events.of_entity(tx, "run", run.id)
        return RunDetail(
            run=_view(tx, run, session),
            spec=run.spec.model_dump(mode="json"),
            attempts=tuple(_attempt(attempt, kinds) for attempt in attempts),
            evaluation=evaluation_view(evaluations.latest(tx, run.id)),
            requests=tuple(to_json(request) for request in requests.of_run(tx, run.id)),
            events=tuple(EventView(e.at, e.action, e.actor, e.old_state, e.new_state, e.reason) for e in history),
            shadow=_shadow(tx, run),
            watch=next((tuple(e.detail["watch"]) for e in reversed(history) if "watch" in e.detail), ()),
            num_erased=erasures.num_since(tx, run.dataset_id, run.created_at),
            progress=_attempt_progress(session, run.id, attempts),
            what_to_do=_what_to_do(tx, run),
        )


def progress(session: Session, run_id: str) -> ProgressView:
    with session.database.read() as tx:
        run = runs.find(tx, run_id)
        waits_for = _view(tx, run, session).waits_for
        attempts = queue.attempts_of_run(tx, run.id)
        what_to_do = _what_to_do(tx, run)
    is_over = run.state in RUN.finished or run.state in (RunState.HELD, RunState.PAUSED)
    now = _attempt_progress(session, run.id, attempts)
    seen = ProgressView(run.state, run.reason, waits_for, is_over=is_over, what_to_do=what_to_do)
    return seen if now is None else replace(seen, **vars(now))


def plan(session: Session, limit: int) -> Sequence[PlannedRun]:
    with session.database.read() as tx:
        found = runs.listing(tx, states=RUN.unfinished, limit=limit)
        listed = listings.runs(tx, states=RUN.unfinished, limit=limit, no_room=session.no_room)
    views = {run.id: run for run in listed}
    found.sort(key=lambda run: (run.state is RunState.QUEUED, run.priority, run.seq))
    return [_planned(session, run, views[run.id]) for run in found]


def metrics(session: Session, run_id: str) -> Sequence[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for folder in _attempt_dirs(session, run_id):
        for event in _events(folder / "events.jsonl"):
            kind, step, values = event.get("type"), event.get("step"), event.get("values")
            if kind in ("metrics", "validation") and isinstance(step, int) and isinstance(values, dict):
                points.append({"attempt": folder.name, "type": kind, "step": step, **values})
    return points


def logs(session: Session, run_id: str, max_bytes: int) -> str:
    from tunesmith.programs.launch import tail_of_log

    tails = [(folder.name, tail_of_log(folder, max_bytes)) for folder in _attempt_dirs(session, run_id)]
    return "\n".join(f"== {name}\n{tail}" for name, tail in tails if tail)


def _view(tx: Tx, run: Run, session: Session) -> RunView:
    (view,) = listings.runs(tx, run_id=run.id, limit=1, no_room=session.no_room)
    return view


def _planned(session: Session, run: Run, view: RunView) -> PlannedRun:
    from tunesmith.orchestration.submit import estimate

    try:
        guess = estimate(session.database, session.workspace, run.spec)
    except TunesmithError:  # its dataset is damaged or gone, which training will say; a plan still lists it
        return PlannedRun(view, run.spec.dataset.num_train, None, "")
    return PlannedRun(view, run.spec.dataset.num_train, guess.seconds, guess.basis)


def _what_to_do(tx: Tx, run: Run) -> str | None:
    return next(map(next_step, held(tx, run_id=run.id, limit=1)), None)


def _attempt_progress(session: Session, run_id: str, attempts: Sequence[Attempt]) -> AttemptProgress | None:
    """Of the attempt that is open now; None where there is none."""
    if not attempts or attempts[-1].ended_at is not None:
        return None
    return read_progress(session.workspace.runs_dir / run_id / attempts[-1].id)


def _attempt_dirs(session: Session, run_id: str) -> Sequence[Path]:
    with session.database.read() as tx:
        run = runs.find(tx, run_id)
        ids = [attempt.id for attempt in queue.attempts_of_run(tx, run.id)]
    folders = [session.workspace.runs_dir / run.id / attempt_id for attempt_id in ids]
    return [folder for folder in folders if folder.is_dir()]


def _shadow(tx: Tx, run: Run) -> ShadowView | None:
    """None for a run that shadows nothing and never did."""
    found = shadows.progress(tx, run.id) or (_NO_SHADOW if run.state is RunState.SHADOWING else None)
    if found is None:
        return None
    values = {name: value for name, value in vars(found).items() if name != "first_at"}
    return ShadowView(**values, min_count=run.spec.shadow.min_count, since=found.first_at)


def _attempt(attempt: Attempt, kinds: dict[str, str]) -> AttemptView:
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
