"""A dead worker's task is taken over after its lease; three times, and it is parked. Wall-clock jumps steal nothing."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from support import tables
from support.rows import (
    ACTOR,
    ALL_KINDS,
    WORKER,
    a_claimed_run,
    a_run,
    a_task,
    an_adapter,
    attempt_with,
    claim_of,
    dump,
    force,
    moves,
    seconds_until_due,
)
from tunesmith.core import clock
from tunesmith.core.errors import LeaseLost
from tunesmith.datasets.listings import newest
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.programs.stage import StageEnd
from tunesmith.runs import listings
from tunesmith.runs.queries import requests, runs, tasks, workers
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import AttemptState, TaskKind, TaskState, backoff_s
from tunesmith.store import events
from tunesmith.store.database import Database, Tx


def _run_out(database: Database, task_id: str) -> None:
    with database.write() as tx:
        force(tx, tables.tasks, task_id, lease_until=tx.lease_now - 0.001)


def _reap(database: Database) -> list[str]:
    """One sweep; which tasks were taken away."""
    with database.write() as tx:
        expired = tasks.expired(tx)
        for claim in expired:
            lifecycle.settle_lost(tx, claim, actor="wk-reaper")
    return [claim.task.id for claim in expired]


def _claim_again(database: Database, task_id: str) -> None:
    with database.write() as tx:
        force(tx, tables.tasks, task_id, available_at=None)
        lifecycle.begin(tx, claim_of(tx, task_id), actor=WORKER)


def test_lease_that_still_runs_is_left_alone(database: Database) -> None:
    with database.write() as tx:
        claim = claim_of(tx, a_task(tx))
    before = dump(database)
    assert _reap(database) == []
    assert dump(database) == before
    with database.write() as tx:
        tasks.renew(tx, claim.lease, 30.0)


def _is_kept_back(tx: Tx, task_id: str, seconds: float, *, since: float) -> bool:
    """Whether it waits for so long from a moment between `since` and now, however slow the machine is."""
    passed = time.monotonic() - since
    return seconds - passed - 0.01 <= seconds_until_due(tx, task_id) <= seconds + 0.01


def test_lease_that_ran_out_goes_back_to_waiting_with_backoff(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
    _run_out(database, claim.task.id)
    begun = time.monotonic()
    assert _reap(database) == [claim.task.id]
    with database.read() as tx:
        task, attempt = tasks.get(tx, claim.task.id), attempt_with(tx, claim.attempt.id)
        assert (task.state, task.counts.num_crashes, task.counts.num_errors) == (TaskState.WAITING, 1, 0)
        assert (attempt.state, attempt.ended_at is not None) == (AttemptState.LOST, True)
        assert _is_kept_back(tx, task.id, 1.0, since=begun)
        assert runs.get(tx, run.id).state is RunState.QUEUED
        assert moves(tx, "task", task.id)[-1].actor == "wk-reaper"
    assert _reap(database) == []


@pytest.mark.parametrize(
    ("state", "kind", "end"),
    [
        (RunState.TRAINING, TaskKind.TRAIN, RunState.FAILED),
        (RunState.EVALUATING, TaskKind.EVALUATE, RunState.FAILED),
        (RunState.DEPLOYING, TaskKind.DEPLOY, RunState.HELD),
        (RunState.WATCHING, TaskKind.WATCH, RunState.ROLLED_BACK),
    ],
)
def test_third_lost_lease_parks_the_task_and_ends_or_holds_its_run(
    database: Database, state: RunState, kind: TaskKind, end: RunState
) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, state, kind)
        if kind is not TaskKind.TRAIN:
            live = AdapterState.LIVE if state is RunState.WATCHING else AdapterState.CANDIDATE
            an_adapter(tx, live, run_id=run.id)
    task_id = claim.task.id
    for crash in (1, 2, 3):
        _run_out(database, task_id)
        assert _reap(database) == [task_id]
        with database.read() as tx:
            task = tasks.get(tx, task_id)
            assert task.counts.num_crashes == crash
            assert task.state is (TaskState.WAITING if crash < 3 else TaskState.PARKED)
        if crash < 3:
            _claim_again(database, task_id)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is end
        if end is RunState.FAILED:
            [failed] = listings.failed(tx, within=timedelta(days=1), limit=9)
            assert (failed.id, failed.is_parked) == (run.id, True)
        assert "3 crashes" in tasks.get(tx, task_id).reason
        assert tasks.open_of_run(tx, run.id) is None
        if end is RunState.ROLLED_BACK:
            assert adapters.live(tx, run.profile) is None


def test_deploy_parked_after_its_flip_takes_the_flip_back(database: Database) -> None:
    with database.write() as tx:
        old = an_adapter(tx, AdapterState.SUPERSEDED)
        run, claim = a_claimed_run(tx, RunState.DEPLOYING, TaskKind.DEPLOY)
        flipped = an_adapter(tx, AdapterState.LIVE, run_id=run.id)
        tx.run(
            tables.deployments.insert().values(
                profile=run.profile,
                wanted_adapter_id=flipped.id,
                previous_adapter_id=old.id,
                flipped_at=tx.now,
                flipped_by=WORKER,
                targets=[],
            )
        )
        force(tx, tables.tasks, claim.task.id, num_crashes=2)
    _run_out(database, claim.task.id)
    _reap(database)
    with database.read() as tx:
        live = adapters.live(tx, run.profile)
        assert live is not None
        assert live.id == old.id
        assert adapters.get(tx, flipped.id).state is AdapterState.ROLLED_BACK
        assert runs.get(tx, run.id).state is RunState.HELD
        claimable = [t.kind for t in _waiting(database)]
    assert claimable == [TaskKind.RECONCILE]  # the targets follow


def _waiting(database: Database) -> list[tasks.Task]:
    found = []
    with database.write() as tx:
        while (claim := tasks.claim(tx, WORKER, ALL_KINDS, 30.0)) is not None:
            found.append(claim.task)
    return found


def test_task_without_a_run_is_parked_too(database: Database) -> None:
    with database.write() as tx:
        task_id = a_task(tx, kind=TaskKind.EXPORT)
    for _ in range(3):
        _claim_again(database, task_id)
        _run_out(database, task_id)
        _reap(database)
    with database.read() as tx:
        assert tasks.get(tx, task_id).state is TaskState.PARKED


def test_rollback_is_tried_until_the_targets_follow_and_interruptions_are_free(database: Database) -> None:
    """The pointer has moved already; parking the task would leave a target on the bad version for ever."""
    with database.write() as tx:
        task_id = a_task(tx, kind=TaskKind.RECONCILE)
    for number in range(1, 8):
        _claim_again(database, task_id)
        _run_out(database, task_id)
        begun = time.monotonic()
        _reap(database)
        with database.read() as tx:
            task = tasks.get(tx, task_id)
            assert (task.state, task.payload) == (TaskState.WAITING, {"num_failures": number})
            assert _is_kept_back(tx, task_id, backoff_s(number), since=begun)
    with database.write() as tx:
        force(tx, tables.tasks, task_id, available_at=None)
        claim = claim_of(tx, task_id)
        lifecycle.settle(tx, claim, StageEnd(AttemptState.INTERRUPTED, error="TERM"), actor=WORKER)
        task = tasks.get(tx, task_id)
        assert (task.payload, seconds_until_due(tx, task_id)) == ({"num_failures": 7}, 0.0)


def test_many_expired_leases_are_reaped_a_few_at_a_time(database: Database) -> None:
    """No write transaction grows with the number of the dead."""
    with database.write() as tx:
        ids = [a_task(tx) for _ in range(30)]
        for _ in ids:
            tasks.claim(tx, WORKER, ALL_KINDS, -1.0)
    reaped = [_reap(database), _reap(database), _reap(database)]
    assert [len(some) for some in reaped] == [20, 10, 0]
    assert reaped[0] + reaped[1] == ids


def test_poison_run_is_parked_while_others_go_on(database: Database) -> None:
    with database.write() as tx:
        poison = a_task(tx)
        good = [a_task(tx) for _ in range(10)]
    done: list[str] = []
    for _ in range(20):
        with database.write() as tx:
            force(tx, tables.tasks, poison, available_at=None)
            claim = tasks.claim(tx, WORKER, ALL_KINDS, 30.0)
            if claim is None:
                break
            if claim.task.id == poison:
                force(tx, tables.tasks, poison, lease_until=tx.lease_now - 1)
            else:
                tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER)
                done.append(claim.task.id)
        _reap(database)
    assert done == good
    with database.read() as tx:
        assert tasks.get(tx, poison).state is TaskState.PARKED


def test_successful_look_forgives_earlier_crashes(database: Database) -> None:
    """A watch lasts for hours; three workers that died in that time are not three crashes in a row."""
    with database.write() as tx:
        _, claim = a_claimed_run(tx, RunState.WATCHING, TaskKind.WATCH)
        force(tx, tables.tasks, claim.task.id, num_crashes=2)
        tasks.reschedule(tx, claim.lease, 0.0, actor=WORKER, reason="healthy so far")
        assert tasks.get(tx, claim.task.id).counts.num_crashes == 0


@pytest.mark.parametrize(("kind", "end"), [
    (RequestKind.CANCEL, RunState.CANCELLED), (RequestKind.PAUSE, RunState.PAUSED), (RequestKind.STOP, RunState.QUEUED),
])  # fmt: skip
def test_wish_on_a_lost_attempt_is_still_granted(database: Database, kind: RequestKind, end: RunState) -> None:
    """The worker died before it could answer. Stop wants a result, so training goes on and is stopped then."""
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        requests.add(tx, run.id, kind, actor=ACTOR)
    _run_out(database, claim.task.id)
    _reap(database)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is end
        assert [wish.kind for wish in requests.unanswered(tx, run.id)] == ([kind] if end is RunState.QUEUED else [])


JUMPS = [timedelta(hours=1), timedelta(hours=-1), timedelta(days=3652), timedelta(days=-3652)]


@pytest.mark.parametrize("jump", JUMPS, ids=str)
def test_clock_jump_steals_no_lease_and_changes_no_order(
    database: Database, monkeypatch: pytest.MonkeyPatch, jump: timedelta
) -> None:
    real = clock.utc_now
    with database.write() as tx:
        claim = claim_of(tx, a_task(tx))
        workers.register(tx, WORKER, host="h", process="{}", kinds=ALL_KINDS, alive_s=30.0)
        before = [a_task(tx) for _ in range(3)]
        kept_back = tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, delay_s=60.0)
    monkeypatch.setattr(clock, "utc_now", lambda: real() + jump)
    assert _reap(database) == []
    with database.write() as tx:
        workers.remove_expired(tx)
        assert [worker.id for worker in workers.alive(tx)] == [WORKER]
        tasks.renew(tx, claim.lease, 30.0)
        after = [a_task(tx) for _ in range(3)]
        assert seconds_until_due(tx, kept_back) == pytest.approx(60.0, abs=5.0)
    assert [task.id for task in _waiting(database)] == before + after
    with database.write() as tx:
        tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER)
        history = events.of_entity(tx, "task", claim.task.id)
        assert [event.new_state for event in history] == ["waiting", "leased", "done"]


@pytest.mark.parametrize("jump", JUMPS, ids=str)
def test_clock_jump_changes_no_listing(database: Database, monkeypatch: pytest.MonkeyPatch, jump: timedelta) -> None:
    from support.rows import a_campaign, a_dataset
    from tunesmith.profiles import queries as campaigns
    from tunesmith.profiles.rules.campaign import CampaignState

    real = clock.utc_now
    with database.write() as tx:
        first = (a_dataset(tx), a_campaign(tx, CampaignState.ARCHIVED).id, a_run(tx).id)
    monkeypatch.setattr(clock, "utc_now", lambda: real() + jump)
    with database.write() as tx:
        second = (a_dataset(tx), a_campaign(tx).id, a_run(tx).id)
    with database.read() as tx:
        listed = [row.id for row in newest(tx, limit=100)]
        assert listed.index(second[0]) < listed.index(first[0])
        assert [row.id for row in campaigns.listing(tx)] == [second[1], first[1]]
        assert campaigns.get(tx, second[1]).parent_id == first[1]
        assert [row.id for row in runs.listing(tx)] == [second[2], first[2]]


def test_another_boot_means_the_lease_is_over_on_sqlite_only(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boot clock starts again at nought: a lease from before cannot be compared, and its holder is gone."""
    with database.write() as tx:
        claim = claim_of(tx, a_task(tx))
        workers.register(tx, WORKER, host="h", process="{}", kinds=ALL_KINDS, alive_s=30.0)
        is_sqlite = not tx.is_postgres
    monkeypatch.setattr(clock, "boot_id", lambda: "another boot")
    monkeypatch.setattr(clock, "boot_seconds", lambda: 5.0)
    with database.read() as tx:
        assert len(workers.alive(tx)) == (0 if is_sqlite else 1)
    assert _reap(database) == ([claim.task.id] if is_sqlite else [])
    if is_sqlite:
        with pytest.raises(LeaseLost), database.write() as tx:
            tasks.renew(tx, claim.lease, 30.0)
