"""The runs of a campaign: which is unfinished, which ended how, when the last was opened, how long each has trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from tunesmith.runs.queries.runs import Run, from_row
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.tables import attempts, runs, tasks
from tunesmith.store.database import Tx

_ON_DEVICE = (TaskKind.TRAIN, TaskKind.EVALUATE)
WITH_RESULT = (RunState.DEPLOYED, RunState.COMPLETED, RunState.REJECTED, RunState.ROLLED_BACK)
"""Ends of a run whose training was judged; the others say nothing about what was learnt."""

START, START_REASON, METHOD_REASON = "start_point", "start_reason", "method_reason"
HALF, FIRST_HALF = "half", "first_half"
"""Keys of an automatic run's metadata: where it started and why, and of a round from both starts, which run it is."""


@dataclass(frozen=True)
class EndedRound:
    """A run of a campaign, as far as the next one's start depends on it."""

    run_id: str
    state: RunState
    is_automatic: bool
    from_base: bool
    """It started from the bare base."""
    method: str
    metadata: Mapping[str, str]
    """What was said of it when it was opened."""


@dataclass(frozen=True)
class RoundUse:
    """What one run of a campaign has used of a device, in seconds times processes."""

    run_id: str
    train_s: float
    evaluate_s: float
    most_train_s: float
    """What its budget allows."""
    is_finished: bool

    @property
    def seconds(self) -> float:
        return self.train_s + self.evaluate_s

    @property
    def most_s(self) -> float:
        """The most that its training can still come to; what it has used, if it has ended."""
        return self.seconds if self.is_finished else max(self.train_s, self.most_train_s) + self.evaluate_s


def unfinished_automatic(tx: Tx, campaign_id: str) -> tuple[str, RunState] | None:
    """Id and state of the campaign's automatic run that has not ended; there is at most one."""
    mine = (runs.c.campaign_id == campaign_id, sa.text("automatic AND finished_at IS NULL"))
    row = tx.first(sa.select(runs.c.id, runs.c.state).where(*mine))
    return None if row is None else (row["id"], RunState(row["state"]))


def last_opened_at(tx: Tx, campaign_id: str) -> datetime | None:
    """When the campaign's last automatic run was opened."""
    mine = (runs.c.campaign_id == campaign_id, runs.c.automatic)
    row = tx.first(sa.select(runs.c.created_at).where(*mine).order_by(runs.c.seq.desc()).limit(1))
    return None if row is None else row["created_at"]


def with_result(tx: Tx, campaign_id: str, limit: int) -> list[EndedRound]:
    """The runs that trained and were judged, the newest first; one that brought a version live again did neither."""
    judged = (runs.c.state.in_(WITH_RESULT), runs.c.spec["deploys"].as_string().is_(None))
    return _light(tx, campaign_id, limit, *judged)


def last_automatic(tx: Tx, campaign_id: str) -> EndedRound | None:
    """The campaign's last automatic run, in whatever state."""
    return next(iter(_light(tx, campaign_id, 1, runs.c.automatic)), None)


def is_beaten_half(tx: Tx, run: Run) -> bool:
    """Whether it is the second half of a round whose first half went live: the round itself was no failure."""
    first = run.spec.metadata.get(FIRST_HALF) if run.automatic else None
    if first is None:
        return False
    won = runs.c.state.in_([RunState.DEPLOYED, RunState.COMPLETED])
    return tx.first(sa.select(runs.c.id).where(runs.c.id == first, won)) is not None


def _light(tx: Tx, campaign_id: str, limit: int, *wanted: sa.ColumnElement[bool]) -> list[EndedRound]:
    """Without reading whole specs: this is asked every minute."""
    spec = runs.c.spec
    query = (
        sa.select(
            runs.c.id, runs.c.state, runs.c.automatic, spec["method"].as_string().label("method"),
            spec["start"].as_json().label("start"), spec["metadata"].as_json().label("metadata"),
        )
        .where(runs.c.campaign_id == campaign_id, *wanted)
        .order_by(runs.c.seq.desc())
        .limit(limit)
    )  # fmt: skip
    return [
        EndedRound(row.id, RunState(row.state), row.automatic, row.start is None, row.method, row.metadata or {})
        for row in tx.conn.execute(query)
    ]


def of_campaign(tx: Tx, campaign_id: str, limit: int) -> list[Run]:
    """The newest first."""
    query = sa.select(runs).where(runs.c.campaign_id == campaign_id).order_by(runs.c.seq.desc()).limit(limit)
    return [from_row(row) for row in tx.all(query)]


def number_of(tx: Tx, campaign_id: str) -> int:
    query = sa.select(sa.func.count()).select_from(runs).where(runs.c.campaign_id == campaign_id)
    return int(tx.conn.execute(query).scalar_one())


def use_of_device(tx: Tx, campaign_id: str) -> dict[str, RoundUse]:
    """By run of the campaign, in the order they were opened. Attempts under way count up to now."""
    used = _seconds(tx, campaign_id)
    query = (
        sa.select(
            runs.c.id, runs.c.finished_at,
            runs.c.spec["num_processes"].as_integer().label("processes"),
            runs.c.spec["budgets"]["wall_s"].as_float().label("wall_s"),
        )
        .where(runs.c.campaign_id == campaign_id)
        .order_by(runs.c.seq)
    )  # fmt: skip
    found = {}
    for row in tx.conn.execute(query):
        times = row.processes or 1
        train_s, evaluate_s = (used.get((row.id, kind), 0.0) * times for kind in _ON_DEVICE)
        is_finished = row.finished_at is not None
        found[row.id] = RoundUse(row.id, train_s, evaluate_s, (row.wall_s or 0.0) * times, is_finished)
    return found


def _seconds(tx: Tx, campaign_id: str) -> Mapping[tuple[str, str], float]:
    query = (
        sa.select(runs.c.id, tasks.c.kind, attempts.c.started_at, attempts.c.ended_at)
        .join(tasks, tasks.c.run_id == runs.c.id)
        .join(attempts, attempts.c.task_id == tasks.c.id)
        .where(runs.c.campaign_id == campaign_id, tasks.c.kind.in_(_ON_DEVICE))
    )
    found: dict[tuple[str, str], float] = {}
    for run_id, kind, started_at, ended_at in tx.conn.execute(query):
        span = max((ended_at or tx.now) - started_at, timedelta(0))  # a clock may have been set back
        found[run_id, kind] = found.get((run_id, kind), 0.0) + span.total_seconds()
    return found
