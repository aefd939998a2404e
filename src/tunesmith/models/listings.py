"""Runs and adapter versions as listings show them, as plain SQL: the number of statements does not depend on theirs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tunesmith.models.rules import AdapterState, version_name
from tunesmith.runs.listings import OPEN_TASK, OPEN_TASK_COLUMNS, Queue, has_ended, queue
from tunesmith.runs.rules.run import Priority, RunState
from tunesmith.runs.rules.waiting import why_it_waits
from tunesmith.store.reader import Reader, instant_of, json_of

ADAPTERS_OF_RUNS = """
LEFT JOIN adapters made ON made.run_id = r.id
LEFT JOIN adapters again ON made.id IS NULL AND again.id = {deploys}"""
"""The version that a run `r` made, or deploys again."""
_RUNS = f"""
SELECT r.id, r.profile, r.state, r.reason, r.priority, {{trainer}} AS trainer, {{method}} AS method, r.dataset_id,
    r.campaign_id, r.parent_id, r.created_at, r.created_by, r.finished_at,
    COALESCE(made.profile, again.profile) AS adapter_profile, COALESCE(made.version, again.version) AS adapter_version,
    COALESCE(made.state, again.state) AS adapter_state, {OPEN_TASK_COLUMNS}
FROM runs r{ADAPTERS_OF_RUNS}{OPEN_TASK}
WHERE {{chosen}} ORDER BY r.seq DESC LIMIT :limit"""  # noqa: S608 - our own text
_ADAPTERS = """
SELECT a.id, a.profile, a.version, a.state, a.run_id, r.state AS run_state, a.digest, a.path, a.metrics, a.created_at
FROM adapters a LEFT JOIN runs r ON r.id = a.run_id
WHERE {chosen} ORDER BY a.created_at DESC, a.version DESC LIMIT :limit"""


@dataclass(frozen=True)
class ListedRun:
    """A run as listings show it."""

    id: str
    profile: str
    state: RunState
    reason: str
    waits_for: str | None
    priority: str
    trainer: str
    method: str
    dataset_id: str
    campaign_id: str | None
    parent_id: str | None
    adapter: str | None
    """The version that it made, or deploys again."""
    adapter_state: AdapterState | None
    """What became of its version since."""
    created_at: datetime
    created_by: str
    finished_at: datetime | None


@dataclass(frozen=True)
class ListedAdapter:
    """A version, and the state of the run that made it."""

    id: str
    profile: str
    version: int
    state: AdapterState
    run_id: str | None
    run_state: RunState | None
    digest: str
    path: str
    metrics: dict[str, float]
    created_at: datetime

    @property
    def name(self) -> str:
        return version_name(self.profile, self.version)


def runs(
    reader: Reader,
    *,
    limit: int,
    profile: str | None = None,
    states: Collection[RunState] | None = None,
    run_id: str | None = None,
    no_room: str | None = None,
) -> list[ListedRun]:
    """The newest first. `no_room`: why the disk keeps training from beginning."""
    text = _RUNS.format(
        trainer=reader.json_text("r.spec", "trainer"),
        method=reader.json_text("r.spec", "method"),
        deploys=reader.json_text("r.spec", "deploys", "id"),
        chosen=_chosen("r", profile, states, run_id),
    )
    rows = reader.rows(text, limit=limit, **_values(profile, run_id))
    waiting = None if all(map(has_ended, rows)) else queue(reader)
    return [_run(row, waiting, no_room) for row in rows]


def _run(row: Any, waiting: Queue | None, no_room: str | None) -> ListedRun:
    version, finished_at = row["adapter_version"], row["finished_at"]
    return ListedRun(
        id=row["id"],
        profile=row["profile"],
        state=RunState(row["state"]),
        reason=row["reason"],
        waits_for=None if waiting is None or has_ended(row) else why_it_waits(waiting.facts(row, no_room)),
        priority=Priority.of_rank(row["priority"]).value,
        trainer=row["trainer"],
        method=row["method"],
        dataset_id=row["dataset_id"],
        campaign_id=row["campaign_id"],
        parent_id=row["parent_id"],
        adapter=None if version is None else version_name(row["adapter_profile"], version),
        adapter_state=None if version is None else AdapterState(row["adapter_state"]),
        created_at=instant_of(row["created_at"]),
        created_by=row["created_by"],
        finished_at=None if finished_at is None else instant_of(finished_at),
    )


def num_runs(reader: Reader, *, profile: str | None = None, states: Collection[RunState] | None = None) -> int:
    (row,) = reader.rows(
        f"SELECT count(*) AS num FROM runs r WHERE {_chosen('r', profile, states)}",  # noqa: S608 - our own names
        **_values(profile),
    )
    return int(row["num"])


def adapters(
    reader: Reader, *, limit: int, profile: str | None = None, adapter_id: str | None = None
) -> list[ListedAdapter]:
    """The newest, by profile, the newest of each profile first."""
    text = _ADAPTERS.format(chosen=_chosen("a", profile, thing_id=adapter_id))
    found = [
        ListedAdapter(
            id=row["id"],
            profile=row["profile"],
            version=row["version"],
            state=AdapterState(row["state"]),
            run_id=row["run_id"],
            run_state=None if row["run_state"] is None else RunState(row["run_state"]),
            digest=row["digest"],
            path=row["path"],
            metrics=json_of(row["metrics"]),
            created_at=instant_of(row["created_at"]),
        )
        for row in reader.rows(text, limit=limit, **_values(profile, adapter_id))
    ]
    return sorted(found, key=lambda adapter: (adapter.profile, -adapter.version))


def num_adapters(reader: Reader, *, profile: str | None = None) -> int:
    (row,) = reader.rows(
        f"SELECT count(*) AS num FROM adapters a WHERE {_chosen('a', profile)}",  # noqa: S608 - our own names
        **_values(profile),
    )
    return int(row["num"])


def _chosen(
    table: str, profile: str | None, states: Collection[RunState] | None = None, thing_id: str | None = None
) -> str:
    conditions = ["1 = 1"]
    if profile is not None:
        conditions.append(f"{table}.profile = :profile")
    if states is not None:  # names of ours, spelt out so that an index on states is used
        conditions.append(f"{table}.state IN ({', '.join(repr(state.value) for state in sorted(states))})")
    if thing_id is not None:
        conditions.append(f"{table}.id = :thing_id")
    return " AND ".join(conditions)


def _values(profile: str | None, thing_id: str | None = None) -> dict[str, str]:
    values = {"profile": profile, "thing_id": thing_id}
    return {name: value for name, value in values.items() if value is not None}
