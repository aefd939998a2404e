"""Claiming: by priority, then age, kinds a worker takes, backoff, e-stop; two workers never get the same task."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import (
    ACTOR,
    ALL_KINDS,
    WORKER,
    a_profile,
    a_run,
    a_task,
    attempt_with,
    claim_of,
    force,
    moves,
    seconds_until_due,
)
from tunesmith.core.errors import LeaseLost
from tunesmith.runs import listings
from tunesmith.runs.queries import switches, tasks
from tunesmith.runs.rules.run import Priority, RunState
from tunesmith.runs.rules.task import STOPPED_BY_ESTOP, AttemptState, ErrorClass, TaskKind, TaskState
from tunesmith.store.database import Database


def _claim_all(database: Database, kinds: tuple[TaskKind, ...] = ALL_KINDS) -> list[str]:
    claimed = []
    while True:
        with database.write() as tx:
            claim = tasks.claim(tx, WORKER, kinds, 30.0)
        if claim is None:
            return claimed
        claimed.append(claim.task.id)


def test_claim_takes_priority_first_then_age(database: Database) -> None:
    with database.write() as tx:
        order = [
            (rank, tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, priority=rank))
            for rank in (2, 1, 0, 1, 2, 0, 1, Priority.HIGH.rank, Priority.LOW.rank, Priority.NORMAL.rank)
        ]
    expected = [task_id for _, task_id in sorted(order, key=lambda pair: pair[0])]  # stable: age within a rank
    assert _claim_all(database) == expected


def test_claim_gives_the_task_an_attempt_and_a_lease(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
        run = a_run(tx, RunState.QUEUED)
        task_id = tasks.add(tx, TaskKind.TRAIN, actor=ACTOR, run_id=run.id, profile=run.profile, payload={"n": 1})
    with database.write() as tx:
        claim = tasks.claim(tx, WORKER, ALL_KINDS, 30.0)
    assert claim is not None
    with database.read() as tx:
        assert claim.task == tasks.get(tx, task_id)
        assert claim.attempt == attempt_with(tx, claim.lease.attempt_id) == tasks.open_attempt(tx, task_id)
        [event] = moves(tx, "task", task_id)
        seen = (event.action, event.actor, event.old_state, event.new_state, event.detail)
        assert seen == ("claimed", WORKER, "waiting", "leased", {"attempt": claim.attempt.id})
    assert (claim.task.state, claim.task.worker_id, claim.task.num_attempts) == (TaskState.LEASED, WORKER, 1)
    assert (claim.task.payload, claim.task.run_id) == ({"n": 1}, run.id)
    assert (claim.attempt.number, claim.attempt.state) == (1, AttemptState.OPEN)
    assert claim.attempt.token != claim.lease.token  # a program's token opens nothing in the store


def test_claim_takes_only_the_kinds_a_worker_does(database: Database) -> None:
    with database.write() as tx:
        train = a_task(tx, kind=TaskKind.TRAIN)
        export = a_task(tx, kind=TaskKind.EXPORT)
    assert _claim_all(database, (TaskKind.EXPORT, TaskKind.PREPARE)) == [export]
    assert _claim_all(database, ()) == []
    assert _claim_all(database, (TaskKind.TRAIN,)) == [train]


def test_claim_leaves_finished_and_leased_tasks_alone(database: Database) -> None:
    with database.write() as tx:
        for state in TaskState:
            if state is not TaskState.WAITING:
                a_task(tx, state)
    assert _claim_all(database) == []


def test_backoff_keeps_a_task_back_until_it_is_due_and_others_pass_it(database: Database) -> None:
    with database.write() as tx:
        later = tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, priority=0, delay_s=3600.0)
        soon = tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, priority=2)
    assert _claim_all(database) == [soon]
    with database.read() as tx:
        assert 3500 < seconds_until_due(tx, later) <= 3600
    with database.write() as tx:
        force(tx, tables.tasks, later, available_at=tx.lease_now - 0.001)
    assert _claim_all(database) == [later]


def test_backoff_on_another_clock_is_over(database: Database) -> None:
    """After a reboot the old boot time means nothing: rather try once too early than never."""
    with database.write() as tx:
        task_id = tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, delay_s=3600.0)
        force(tx, tables.tasks, task_id, available_clock="another boot")
        assert seconds_until_due(tx, task_id) == 0.0
    assert _claim_all(database) == [task_id]


def test_failed_attempts_back_off_as_the_retry_table_says_and_then_end(database: Database) -> None:
    with database.write() as tx:
        task_id = a_task(tx)
    for number, (delay, state) in enumerate([(1.0, "waiting"), (4.0, "waiting"), (0.0, "done")], start=1):
        with database.write() as tx:
            force(tx, tables.tasks, task_id, available_at=None)
            claim = claim_of(tx, task_id)
            assert claim.attempt.number == number
            decision = tasks.end_attempt(
                tx, claim.lease, AttemptState.FAILED, actor=WORKER, error_class=ErrorClass.TRANSIENT, error="EIO"
            )
            assert (decision.delay_s, decision.state) == (delay, state)
            assert seconds_until_due(tx, task_id) == pytest.approx(delay, abs=0.5)
            task = tasks.get(tx, task_id)
            assert (task.state, task.counts.num_errors, task.counts.num_crashes) == (state, number, 0)
            ended = attempt_with(tx, claim.attempt.id)
            assert (ended.state, ended.error_class, ended.error) == ("failed", "transient", "EIO")
            assert ended.ended_at is not None


def test_disk_trouble_is_free_pauses_longer_each_time_and_can_be_found(database: Database) -> None:
    with database.write() as tx:
        task_id = a_task(tx)
        pauses = []
        for _ in range(8):
            force(tx, tables.tasks, task_id, available_at=None, available_clock=None)
            lease = claim_of(tx, task_id).lease
            why = "no space left under /x\nOSError: No space left on device"
            decision = tasks.end_attempt(
                tx, lease, AttemptState.INTERRUPTED, actor=ACTOR, error_class=ErrorClass.DISK, error=why
            )
            pauses.append(decision.delay_s)
        assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
        task = tasks.get(tx, task_id)
        assert (task.state, task.reason) == (TaskState.WAITING, "no space left under /x")
        assert (task.counts.num_crashes, task.counts.num_errors) == (0, 0)
        [found] = listings.without_room(tx, limit=10)
        assert (found.id, found.error) == (task.run_id or task.id, why)
        force(tx, tables.tasks, task_id, available_at=None, available_clock=None)
        lease = claim_of(tx, task_id).lease
        assert listings.without_room(tx, limit=10) == []
        tasks.end_attempt(tx, lease, AttemptState.SUCCEEDED, actor=ACTOR)
        assert listings.without_room(tx, limit=10) == []


@pytest.mark.parametrize("kind", TaskKind)
def test_estop_stops_train_curriculum_and_deploy_only(database: Database, kind: TaskKind) -> None:
    with database.write() as tx:
        task_id = a_task(tx, kind=kind)
        switches.turn(tx, switches.ESTOP, True, actor=ACTOR, reason="smoke")
    stopped = kind in ("train", "curriculum", "deploy")
    assert stopped == (kind in STOPPED_BY_ESTOP)
    assert _claim_all(database) == ([] if stopped else [task_id])
    with database.write() as tx:
        switches.turn(tx, switches.ESTOP, False, actor=ACTOR, reason="it was toast")
    assert _claim_all(database) == ([task_id] if stopped else [])


def test_claims_race_over_200_tasks_and_each_is_claimed_once(database: Database) -> None:
    with database.write() as tx:
        ids = [a_task(tx) for _ in range(200)]
    start = threading.Barrier(8)

    def worker(number: int) -> list[str]:
        start.wait()
        claimed = []
        while True:
            with database.write() as tx:
                claim = tasks.claim(tx, f"wk-{number}", ALL_KINDS, 30.0)
            if claim is None:
                return claimed
            claimed.append(claim.task.id)
            with database.write() as tx:
                tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=f"wk-{number}")

    with ThreadPoolExecutor(8) as pool:
        by_worker = list(pool.map(worker, range(8)))
    taken = Counter(task_id for claimed in by_worker for task_id in claimed)
    assert taken == Counter(ids)
    with database.read() as tx:
        count = sa.select(sa.func.count()).select_from(tables.attempts)
        assert tx.conn.execute(count).scalar_one() == 200
        assert {tasks.get(tx, task_id).state for task_id in ids} == {TaskState.DONE}


def test_claim_on_postgres_skips_what_another_is_just_taking(postgres_database: Database) -> None:
    """Nobody waits behind a claim that is not committed yet."""
    with postgres_database.write() as tx:
        first, second = a_task(tx), a_task(tx)
    with postgres_database.write() as one, postgres_database.write() as two:
        claims = [tasks.claim(tx, WORKER, ALL_KINDS, 30.0) for tx in (one, two)]
        assert [claim.task.id for claim in claims if claim is not None] == [first, second]


def test_lease_of_a_task_that_was_cancelled_meanwhile_is_gone(database: Database) -> None:
    with database.write() as tx:
        claim = claim_of(tx, a_task(tx))
        tasks.end_by(tx, claim.lease, AttemptState.CANCELLED, TaskState.CANCELLED, actor=ACTOR, reason="asked")
    with pytest.raises(LeaseLost), database.write() as tx:
        tasks.renew(tx, claim.lease, 30.0)
