"""What must never be, the database itself refuses: tested by raw SQL past every setter, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from support import tables
from support.rows import (
    ACTOR,
    PROFILE,
    WORKER,
    a_campaign,
    a_claimed_run,
    a_dataset,
    a_profile,
    a_run,
    a_spec,
    a_task,
    an_adapter,
    an_experience,
    claim_of,
    dump,
    force,
)
from tunesmith.core.errors import Conflict, Refused
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.models.rules import AdapterState
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.queries import NewCampaign
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.runs.queries import requests, runs, tasks
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import AttemptState, TaskKind, TaskState
from tunesmith.store.database import Database, Tx


def _refused(database: Database, table: sa.Table, like: str, **changes: Any) -> None:
    """A copy of a row, under another id and with these changes, is refused by the database."""
    before = dump(database)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        _insert_copy(tx, table, like, **changes)
    assert dump(database) == before


def _insert_copy(tx: Tx, table: sa.Table, like: str, **changes: Any) -> None:
    row = tx.first(sa.select(table).where(table.c.id == like))
    assert row is not None
    copy = {name: value for name, value in row.items() if name != "seq"}
    tx.run(table.insert().values({**copy, "id": "copy-1", **changes}))


def test_second_open_attempt_of_a_task_is_refused(database: Database) -> None:
    with database.write() as tx:
        claim = claim_of(tx, a_task(tx))
    _refused(database, tables.attempts, claim.attempt.id, number=2)
    with database.write() as tx:  # an ended one is no second open one
        _insert_copy(tx, tables.attempts, claim.attempt.id, number=2, state="lost", ended_at=tx.now)


def test_attempt_number_is_used_once_per_task(database: Database) -> None:
    with database.write() as tx:
        claim = claim_of(tx, a_task(tx))
        now = tx.now
    _refused(database, tables.attempts, claim.attempt.id, state="lost", ended_at=now)


def test_second_open_task_of_a_run_is_refused(database: Database) -> None:
    with database.write() as tx:
        _, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
    unleased = {"state": "waiting", "lease_token": None}
    _refused(database, tables.tasks, claim.task.id, **unleased)
    with database.write() as tx:
        _insert_copy(tx, tables.tasks, claim.task.id, state="done", lease_token=None)


def test_second_live_adapter_of_a_profile_is_refused(database: Database) -> None:
    with database.write() as tx:
        live = an_adapter(tx, AdapterState.LIVE)
        other = an_adapter(tx)
    _refused(database, tables.adapters, live.id, version=99, run_id=None)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.adapters, other.id, state="live")
    with database.write() as tx:
        an_adapter(tx, AdapterState.LIVE, profile="other")


def test_version_and_run_belong_to_one_adapter(database: Database) -> None:
    with database.write() as tx:
        adapter = an_adapter(tx)
    _refused(database, tables.adapters, adapter.id, run_id=None)
    _refused(database, tables.adapters, adapter.id, version=99)


def test_second_active_campaign_of_a_profile_is_refused(database: Database) -> None:
    with database.write() as tx:
        first = a_campaign(tx)
    _refused(database, tables.campaigns, first.id)
    with pytest.raises(Refused, match="active campaign already"), database.write() as tx:
        a_campaign(tx)
    with database.write() as tx:
        campaigns.move(tx, first.id, CampaignState.PAUSED, actor=ACTOR, reason="x")
        second = a_campaign(tx)
        assert second.parent_id == first.id
    with pytest.raises(Refused, match="active campaign already"), database.write() as tx:
        campaigns.move(tx, first.id, CampaignState.ACTIVE, actor=ACTOR, reason="x")
    with database.write() as tx:
        a_campaign(tx, profile="other")


def test_campaign_of_an_unknown_profile_is_not_called_a_second_one(database: Database) -> None:
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        campaigns.add(tx, NewCampaign("nobody", {}, {}, code_version="", config_hash=""), actor=ACTOR)


def test_second_unfinished_automatic_run_of_a_campaign_is_refused(database: Database) -> None:
    with database.write() as tx:
        campaign = a_campaign(tx)
        first = a_run(tx, campaign_id=campaign.id, automatic=True)
        a_run(tx, campaign_id=campaign.id)  # people may
    _refused(database, tables.runs, first.id)
    with pytest.raises(Refused, match="unfinished automatic run"), database.write() as tx:
        a_run(tx, campaign_id=campaign.id, automatic=True)
    with database.write() as tx:
        runs.move(tx, first.id, RunState.CANCELLED, actor=ACTOR, reason="x")
        a_run(tx, campaign_id=campaign.id, automatic=True)


def test_idempotency_key_belongs_to_one_run(database: Database) -> None:
    with database.write() as tx:
        dataset_id = a_dataset(tx)
        runs.add(tx, a_spec(dataset_id), actor=ACTOR, priority=1, body_hash="b", idempotency_key="key")
    with pytest.raises(Conflict, match="ask again"), database.write() as tx:
        runs.add(tx, a_spec(dataset_id), actor=ACTOR, priority=1, body_hash="b", idempotency_key="key")


def test_run_on_an_unknown_dataset_or_parent_is_not_called_a_conflict(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
        dataset_id = a_dataset(tx)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        runs.add(tx, a_spec("ds-unknown"), actor=ACTOR, priority=1, body_hash="b")
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        runs.add(tx, a_spec(dataset_id), actor=ACTOR, priority=1, body_hash="b", parent_id="run-unknown")


def test_second_open_request_of_a_kind_is_refused(database: Database) -> None:
    with database.write() as tx:
        run = a_run(tx, RunState.TRAINING)
        request = requests.add(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
    _refused(database, tables.requests, request.id)
    with database.write() as tx:
        _insert_copy(tx, tables.requests, request.id, kind="stop")


@pytest.mark.parametrize("state", [state for state in TaskState if state is not TaskState.LEASED])
def test_lease_token_without_a_lease_is_refused_and_a_lease_without_a_token(
    database: Database, state: TaskState
) -> None:
    with database.write() as tx:
        leased, waiting = claim_of(tx, a_task(tx)).task.id, a_task(tx)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.tasks, leased, state=state)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.tasks, waiting, state="leased")


def test_ended_attempt_without_an_end_is_refused(database: Database) -> None:
    with database.write() as tx:
        attempt_id = claim_of(tx, a_task(tx)).attempt.id
    for outcome in AttemptState:
        if outcome is not AttemptState.OPEN:
            with pytest.raises(exc.IntegrityError), database.write() as tx:
                force(tx, tables.attempts, attempt_id, state=outcome)


def test_finished_run_has_an_end_and_an_unfinished_one_has_none(database: Database) -> None:
    with database.write() as tx:
        run = a_run(tx)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.runs, run.id, state="failed")
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.runs, run.id, finished_at=tx.now)


def test_reserved_and_consumed_experiences_belong_to_a_dataset_and_others_to_none(database: Database) -> None:
    with database.write() as tx:
        free, held = an_experience(tx), an_experience(tx, ExperienceState.RESERVED)
        dataset_id = a_dataset(tx)
    for state in ("reserved", "consumed"):
        with pytest.raises(exc.IntegrityError), database.write() as tx:
            force(tx, tables.experiences, free, state=state)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.experiences, free, dataset_id=dataset_id)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.experiences, held, dataset_id=None)


@pytest.mark.parametrize("name", ["runs", "tasks", "attempts", "adapters", "campaigns", "experiences"])
def test_unknown_state_is_refused(database: Database, name: str) -> None:
    with database.write() as tx:
        made = {
            "runs": a_run(tx).id,
            "tasks": a_task(tx),
            "attempts": claim_of(tx, a_task(tx)).attempt.id,
            "adapters": an_adapter(tx).id,
            "campaigns": a_campaign(tx).id,
            "experiences": an_experience(tx),
        }
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        force(tx, tables.metadata.tables[name], made[name], state="halfway")


def test_row_that_others_refer_to_cannot_be_deleted(database: Database) -> None:
    with database.write() as tx:
        run, _ = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
    for table, key in ((tables.runs, run.id), (tables.datasets, run.dataset_id)):
        with pytest.raises(exc.IntegrityError), database.write() as tx:
            tx.run(table.delete().where(table.c.id == key))
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        tx.run(tables.profiles.delete().where(tables.profiles.c.name == PROFILE))


def test_transaction_that_fails_half_way_leaves_nothing(database: Database) -> None:
    before = dump(database)
    with pytest.raises(ZeroDivisionError), database.write() as tx:
        _ = (a_run(tx), a_task(tx), 1 / 0)
    assert dump(database) == before


def test_read_is_one_consistent_view_and_writes_nothing(database: Database) -> None:
    count = sa.select(sa.func.count()).select_from(tables.tasks)
    with database.read() as reader:
        seen = reader.conn.execute(count).scalar_one()
        with database.write() as tx:
            a_task(tx)
        assert reader.conn.execute(count).scalar_one() == seen
    with database.read() as tx:
        assert tx.conn.execute(count).scalar_one() == seen + 1


def test_claim_is_found_through_its_partial_index(database: Database) -> None:
    """Flat as the table grows: neither a scan of the tasks nor a sort."""
    with database.write() as tx:
        for number in range(300):
            a_task(tx, TaskState.DONE if number % 100 else TaskState.WAITING)
        if tx.is_postgres:
            tx.execute("ANALYZE tasks")
            tx.execute("SET LOCAL enable_seqscan = off")  # a few rows are always scanned fastest
        compiled = tasks.sql.claim_first(frozenset(TaskKind)).compiled_for(tx)
        values = {"token": "t", "worker": WORKER, "clock": tx.lease_clock, "lease_s": 30.0}
        explain = "EXPLAIN " if tx.is_postgres else "EXPLAIN QUERY PLAN "
        plan = "\n".join(
            str(row) for row in tx.execute(explain + compiled.text, compiled.parameters(values)).fetchall()
        )
    assert "ix_tasks_waiting" in plan
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan
