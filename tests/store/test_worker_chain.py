"""A worker that ends a task takes the next one in the same transaction; told to stop, it keeps none and burns none."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import ACTOR, ALL_KINDS, PROFILE, WORKER, a_profile, a_task, claim_of
from support.store_processes import broken_invariants
from tunesmith.orchestration.worker import Worker
from tunesmith.profiles.settings import Settings, WorkerSettings
from tunesmith.profiles.workspace import Workspace, init_workspace
from tunesmith.runs.queries import tasks
from tunesmith.runs.rules.task import TaskKind, TaskState
from tunesmith.store import events
from tunesmith.store.database import Database

FAST = Settings(worker=WorkerSettings(poll_s=0.01, sweep_s=60.0))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return init_workspace(tmp_path / "ws")


def _rollbacks(database: Database, num: int) -> list[str]:
    """Tasks that a worker can do without a program: bring the targets of a profile without targets along."""
    with database.write() as tx:
        a_profile(tx)
        return [tasks.add(tx, TaskKind.RECONCILE, actor=ACTOR, profile=PROFILE) for _ in range(num)]


def test_next_task_is_claimed_in_the_transaction_that_ends_the_last(database: Database, workspace: Workspace) -> None:
    ids = _rollbacks(database, 4)
    assert Worker(database, workspace, FAST).run(until_idle=True) == 4
    with database.read() as tx:
        history = [events.of_entity(tx, "task", task_id) for task_id in ids]
        assert {tasks.get(tx, task_id).state for task_id in ids} == {TaskState.DONE}
    ended = [task[-1].at for task in history]
    claimed = [task[1].at for task in history]
    assert [task[1].action for task in history] == ["claimed"] * 4
    assert claimed[1:] == ended[:-1]  # the instant of a transaction is one


def test_worker_swept_too_long_ago_sweeps_before_it_claims_the_next(database: Database, workspace: Workspace) -> None:
    ids = _rollbacks(database, 3)
    always = Settings(worker=WorkerSettings(poll_s=0.01, sweep_s=1e-9))
    assert Worker(database, workspace, always).run(until_idle=True) == 3
    with database.read() as tx:
        history = [events.of_entity(tx, "task", task_id) for task_id in ids]
    assert [task[1].at for task in history][1:] != [task[-1].at for task in history][:-1]


def test_worker_told_to_stop_at_any_moment_keeps_no_lease_and_burns_nothing(
    database: Database, workspace: Workspace
) -> None:
    rng = random.Random(4)
    for _ in range(8):
        _rollbacks(database, 10)
        worker = Worker(database, workspace, FAST)
        thread = threading.Thread(target=worker.run)
        thread.start()
        time.sleep(rng.random() * 0.08)
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()
        with database.read() as tx:
            rows = tx.all(sa.select(tables.tasks.c.state, tables.tasks.c.num_crashes, tables.tasks.c.num_errors))
        assert {row["state"] for row in rows} <= {"waiting", "done"}
        assert {(row["num_crashes"], row["num_errors"]) for row in rows} == {(0, 0)}
    assert broken_invariants(database) == []


def test_lease_that_a_lost_answer_left_behind_is_found_again(database: Database, workspace: Workspace) -> None:
    """The commit of a claim went through, but its answer never came: the worker asks what it holds before it claims."""
    with database.write() as tx:
        a_profile(tx)
        claim = claim_of(tx, tasks.add(tx, TaskKind.RECONCILE, actor=ACTOR, profile=PROFILE), worker="wk-1")
        other = claim_of(tx, a_task(tx), worker="wk-2")
        assert tasks.leased_by(tx, "wk-1") == claim
        assert tasks.leased_by(tx, "wk-2") == other
        assert tasks.leased_by(tx, WORKER) is None
        assert tasks.claim(tx, "wk-1", ALL_KINDS, 30.0) is None
