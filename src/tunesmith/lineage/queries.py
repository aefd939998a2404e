"""What the lineage graph is read from. Every statement uses an index, or looks at a limited number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.datasets.tables import datasets, members
from tunesmith.evaluation.tables import evaluations
from tunesmith.experience.forgetting.rules import tombstone_key
from tunesmith.experience.tables import assessments, experiences
from tunesmith.models.queries import Adapter
from tunesmith.models.queries import get as get_adapter
from tunesmith.models.tables import adapters
from tunesmith.profiles.tables import profiles
from tunesmith.runs.rules.task import AttemptState, TaskKind
from tunesmith.runs.tables import attempts, checkpoints, runs, tasks
from tunesmith.store.database import Tx
from tunesmith.store.events import events
from tunesmith.store.lookup import find_one, get_one

MAX_LATER_RUNS = 1000
"""Runs of a profile after the one that made a version, among which those that started from it are looked for."""
MAX_LATER_EXPERIENCES = 10_000
"""Newest experiences of a profile, among which those that a version answered are counted."""
MAX_EVALUATIONS = 5_000
"""Newest evaluations, among which those with a version are searched."""
_EXPERIENCE_COLUMNS = [column for column in experiences.c if column.name not in ("messages", "reference", "seq")]
"""Never what was said."""


@dataclass(frozen=True)
class StoredRun:
    """A run, whose spec stays plain: a graph shows runs of every earlier version of tunesmith."""

    seq: int
    id: str
    profile: str
    dataset_id: str
    parent_id: str | None
    campaign_id: str | None
    state: str
    reason: str
    automatic: bool
    spec: Mapping[str, Any]
    created_at: datetime
    created_by: str
    finished_at: datetime | None


@dataclass(frozen=True)
class StoredEvaluation:
    id: str
    run_id: str
    adapter_id: str
    baseline_adapter_id: str | None
    judged: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True)
class Flip:
    """One change of what is wanted live."""

    seq: int
    at: datetime
    actor: str
    wanted: str | None
    """Id of the version that went live; None: the bare base."""
    before: str | None
    """Id of the version that was live until then; None: the bare base."""


@dataclass(frozen=True)
class MemberCount:
    """How many members of a dataset have all of these in common."""

    role: str
    split: str
    state: str
    class_name: str
    source: str | None
    served_by: str | None
    num: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True)
class Training:
    """The attempt that trained a version."""

    result: Mapping[str, Any]
    started_at: datetime
    ended_at: datetime | None


def profile_names(tx: Tx) -> list[str]:
    return [str(name) for name in tx.conn.execute(sa.select(profiles.c.name).order_by(profiles.c.name)).scalars()]


def version_names(tx: Tx, limit: int = 500) -> list[str]:
    """The newest versions by name, for a hint."""
    query = sa.select(adapters.c.profile, adapters.c.version).order_by(adapters.c.created_at.desc()).limit(limit)
    return [f"{profile}@v{version}" for profile, version in tx.conn.execute(query)]


_NEWEST: dict[str, tuple[sa.Column[str], sa.Column[Any]]] = {
    "ad": (adapters.c.id, adapters.c.created_at),
    "run": (runs.c.id, runs.c.seq),
    "ds": (datasets.c.id, datasets.c.seq),
    "xp": (experiences.c.id, experiences.c.seq),
    "ev": (evaluations.c.id, evaluations.c.seq),
}


def newest_ids(tx: Tx, prefix: str, limit: int = 500) -> list[str]:
    """The newest ids that begin with a prefix of ours, for a hint."""
    column, order = _NEWEST[prefix]
    return [str(each) for each in tx.conn.execute(sa.select(column).order_by(order.desc()).limit(limit)).scalars()]


def experience_with_key(tx: Tx, key: str) -> str | None:
    """The experience that was captured under a key, such as the id of an answer, in whichever profile."""
    keys = sorted({key, tombstone_key(key)})
    for profile in profile_names(tx):  # the index begins with the profile
        mine = (experiences.c.profile == profile, experiences.c.natural_key.in_(keys))
        row = tx.first(sa.select(experiences.c.id).where(*mine))
        if row is not None:
            return str(row["id"])
    return None


def run(tx: Tx, run_id: str) -> StoredRun:
    return _run(tx.conn.execute(sa.select(*_RUN_COLUMNS).where(runs.c.id == run_id)).mappings().one())


def runs_on(tx: Tx, dataset_id: str, limit: int) -> list[StoredRun]:
    """The oldest first."""
    query = sa.select(*_RUN_COLUMNS).where(runs.c.dataset_id == dataset_id).order_by(runs.c.seq).limit(limit)
    return [_run(row) for row in tx.all(query)]


def num_runs_on(tx: Tx, dataset_id: str) -> int:
    return int(tx.conn.execute(sa.select(sa.func.count()).where(runs.c.dataset_id == dataset_id)).scalar_one())


@dataclass(frozen=True)
class LaterRun:
    """A run, and the versions that it began with."""

    seq: int
    id: str
    start: str | None
    deploys: str | None


def later_runs(tx: Tx, profile: str, after: int) -> list[LaterRun]:
    """The next runs of a profile after a place in the order of runs, `MAX_LATER_RUNS` at most.

    No index leads from a version to the runs that started from it, so these are searched.
    """
    query = (
        sa.select(
            runs.c.seq,
            runs.c.id,
            runs.c.spec["start"]["id"].as_string(),
            runs.c.spec["deploys"]["id"].as_string(),
        )
        .where(runs.c.profile == profile, runs.c.seq > after)
        .order_by(runs.c.seq)
        .limit(MAX_LATER_RUNS)
    )
    return [LaterRun(*row) for row in tx.conn.execute(query)]


def training(tx: Tx, run_id: str) -> Training | None:
    """The attempt that trained the run's version."""
    query = (
        sa.select(attempts.c.result, attempts.c.started_at, attempts.c.ended_at)
        .join(tasks, tasks.c.id == attempts.c.task_id)
        .where(tasks.c.run_id == run_id, tasks.c.kind == TaskKind.TRAIN, attempts.c.state == AttemptState.SUCCEEDED)
        .order_by(attempts.c.started_at.desc())
        .limit(1)
    )
    row = tx.first(query)
    return None if row is None else Training(row["result"] or {}, row["started_at"], row["ended_at"])


def num_checkpoints(tx: Tx, run_id: str) -> int:
    return int(tx.conn.execute(sa.select(sa.func.count()).where(checkpoints.c.run_id == run_id)).scalar_one())


def evaluation(tx: Tx, evaluation_id: str) -> StoredEvaluation:
    return _evaluation(get_one(tx, evaluations, evaluation_id))


def find_evaluation(tx: Tx, text: str) -> StoredEvaluation:
    """By its id, or by an unambiguous beginning of it."""
    return _evaluation(find_one(tx, evaluations, "ev", text))


def evaluations_of(tx: Tx, adapter_id: str, limit: int) -> list[StoredEvaluation]:
    """Of a version, by whichever run; the newest first."""
    return _evaluations(tx, evaluations.c.adapter_id == adapter_id, limit)


@dataclass(frozen=True)
class EvaluationPair:
    """What an evaluation compared with what."""

    id: str
    adapter_id: str
    baseline_adapter_id: str | None


def evaluation_pairs(tx: Tx) -> list[EvaluationPair]:
    """Of the newest evaluations, `MAX_EVALUATIONS` at most, the newest first. No index leads to them from a version."""
    columns = (evaluations.c.id, evaluations.c.adapter_id, evaluations.c.baseline_adapter_id)
    query = sa.select(*columns).order_by(evaluations.c.seq.desc()).limit(MAX_EVALUATIONS)
    return [EvaluationPair(*row) for row in tx.conn.execute(query)]


def evaluations_of_run(tx: Tx, run_id: str, limit: int) -> list[StoredEvaluation]:
    """The newest first."""
    return _evaluations(tx, evaluations.c.run_id == run_id, limit)


def evaluations_with_ids(tx: Tx, ids: Sequence[str]) -> list[StoredEvaluation]:
    """The newest first."""
    return _evaluations(tx, evaluations.c.id.in_(ids), len(ids)) if ids else []


def flips(tx: Tx, profile: str, limit: int) -> list[Flip]:
    """Every change of what is live, the oldest first, up to a limit of the newest."""
    query = (
        sa.select(events.c.seq, events.c.at, events.c.actor, events.c.detail)
        .where(events.c.entity == "deployment", events.c.entity_id == profile, events.c.action == "wanted")
        .order_by(events.c.seq.desc())
        .limit(limit)
    )
    rows = tx.all(query)[::-1]
    before = [row["detail"].get("previous") for row in rows[:1]] + [row["detail"].get("wanted") for row in rows[:-1]]
    return [
        Flip(row["seq"], row["at"], row["actor"], row["detail"].get("wanted"), earlier)
        for row, earlier in zip(rows, before, strict=True)
    ]


def experience(tx: Tx, experience_id: str) -> sa.RowMapping:
    """Everything about it but what was said."""
    return tx.conn.execute(_described().where(experiences.c.id == experience_id)).mappings().one()


def datasets_with(tx: Tx, experience_id: str) -> list[sa.RowMapping]:
    """Id, role and split in every dataset that it was in, the oldest first."""
    columns = (members.c.dataset_id, members.c.role, members.c.split)
    return tx.all(sa.select(*columns).where(members.c.experience_id == experience_id).order_by(members.c.seq))


def members_of(tx: Tx, dataset_id: str, limit: int) -> list[sa.RowMapping]:
    """The first experiences of a dataset, with role and split, but not what was said."""
    query = _described(members.c.role, members.c.split).join(members, members.c.experience_id == experiences.c.id)
    return tx.all(query.where(members.c.dataset_id == dataset_id).order_by(members.c.seq).limit(limit))


def member_counts(tx: Tx, dataset_id: str) -> list[MemberCount]:
    """The members of a dataset, counted by everything that a summary tells of them."""
    at = sa.func.coalesce(experiences.c.captured_at, experiences.c.created_at, type_=experiences.c.created_at.type)
    alike = (
        members.c.role,
        members.c.split,
        experiences.c.state,
        assessments.c.class_name,
        experiences.c.source,
        experiences.c.served_by,
    )
    query = (
        sa.select(*alike, sa.func.count().label("num"), sa.func.min(at).label("first"), sa.func.max(at).label("last"))
        .select_from(members)
        .join(experiences, experiences.c.id == members.c.experience_id)
        .join(assessments, assessments.c.experience_id == experiences.c.id)
        .where(members.c.dataset_id == dataset_id)
        .group_by(*alike)
    )
    return [MemberCount(*row) for row in tx.conn.execute(query)]


def answered_by(tx: Tx, profile: str, version: str, shown: int) -> tuple[int, list[str], bool]:
    """Of the newest experiences, how many a version answered; the newest ids; whether there are older experiences."""
    newest = (
        sa.select(experiences.c.seq, experiences.c.id, experiences.c.served_by)
        .where(experiences.c.profile == profile)
        .order_by(experiences.c.seq.desc())
        .limit(MAX_LATER_EXPERIENCES + 1)
        .subquery()
    )
    num_looked_at = int(tx.conn.execute(sa.select(sa.func.count()).select_from(newest)).scalar_one())
    mine = newest.c.served_by == version
    num = int(tx.conn.execute(sa.select(sa.func.count()).select_from(newest).where(mine)).scalar_one())
    query = sa.select(newest.c.id).where(mine).order_by(newest.c.seq.desc()).limit(shown)
    return num, [str(each) for each in tx.conn.execute(query).scalars()], num_looked_at > MAX_LATER_EXPERIENCES


_RUN_COLUMNS = [runs.c[name] for name in StoredRun.__dataclass_fields__]


def _run(row: Mapping[Any, Any]) -> StoredRun:
    return StoredRun(**{name: row[name] for name in StoredRun.__dataclass_fields__})


def _evaluations(tx: Tx, chosen: sa.ColumnElement[bool], limit: int) -> list[StoredEvaluation]:
    return [
        _evaluation(row)
        for row in tx.all(sa.select(evaluations).where(chosen).order_by(evaluations.c.seq.desc()).limit(limit))
    ]


def _evaluation(row: Mapping[Any, Any]) -> StoredEvaluation:
    return StoredEvaluation(**{name: row[name] for name in StoredEvaluation.__dataclass_fields__})


def _described(*more: sa.ColumnElement[Any]) -> sa.Select[Any]:
    query = sa.select(*_EXPERIENCE_COLUMNS, assessments.c.class_name, *more)
    return query.join(assessments, assessments.c.experience_id == experiences.c.id)


def version_named(tx: Tx, name: str) -> Adapter | None:
    """The version that an experience says answered it; None where it names none of ours."""
    profile, at, version = name.partition("@v")
    if not at or not version.isdecimal() or len(version) > 9:
        return None
    row = tx.first(sa.select(adapters.c.id).where(adapters.c.profile == profile, adapters.c.version == int(version)))
    return None if row is None else get_adapter(tx, row["id"])


def base_of(tx: Tx, profile: str) -> Mapping[str, Any] | None:
    """The base of a profile as its newest run names it; None before its first run."""
    query = sa.select(runs.c.spec).where(runs.c.profile == profile).order_by(runs.c.seq.desc()).limit(1)
    row = tx.first(query)
    return None if row is None else row["spec"]["base"]
