"""Every pair of states of every entity, and every way a run can end: DESIGN's tables against the code and the store."""

# ruff: noqa: F811 - pytest's way of borrowing fixtures: the parameter has the fixture's name

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.databases import (  # noqa: F401
    database,
    postgres,
    postgres_database,
    postgres_store,
    sqlite_template,
    store_url,
)
from support.rows import (
    ACTOR,
    PROFILE,
    a_campaign,
    a_dataset,
    a_profile,
    a_run,
    a_task,
    an_adapter,
    an_experience,
    claim_of,
    force,
    moves,
)
from tunesmith.core import clock
from tunesmith.core.errors import InvalidTransition, Refused
from tunesmith.core.states import Transitions
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import EXPERIENCE, ExperienceState
from tunesmith.models import queries as adapters
from tunesmith.models.rules import ADAPTER, AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.rules.campaign import CAMPAIGN, Breaker, CampaignState, breaker
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import ATTEMPT, TASK, AttemptState, TaskState
from tunesmith.store.database import Database, Tx

# Written out from DESIGN.md, "States, in full", by hand: old state: what may follow.
DESIGN = {
    "run": """
        queued:      training evaluating deploying cancelled skipped
        training:    queued paused evaluating validated failed cancelled
        paused:      queued evaluating cancelled
        evaluating:  deploying shadowing held rejected completed failed cancelled
        shadowing:   evaluating rejected cancelled
        held:        deploying evaluating rejected cancelled
        deploying:   watching evaluating held rejected rolled_back cancelled
        watching:    deployed rolled_back
        deployed:    rolled_back
        completed:
        validated:
        rejected:
        rolled_back:
        failed:
        cancelled:
        skipped:
    """,
    "task": """
        waiting:     leased cancelled
        leased:      done waiting parked cancelled
        done:
        parked:
        cancelled:
    """,
    "attempt": """
        open:        succeeded failed stopped interrupted lost cancelled
        succeeded:
        failed:
        stopped:
        interrupted:
        lost:
        cancelled:
    """,
    "experience": """
        collected:   reserved forgotten
        reserved:    consumed collected forgotten
        consumed:    collected forgotten
        forgotten:
    """,
    "adapter": """
        candidate:   live rejected revoked
        live:        superseded rolled_back revoked
        superseded:  live revoked
        rolled_back: live revoked
        rejected:    live revoked
        revoked:
    """,
    "campaign": """
        active:      paused
        paused:      active archived
        archived:
    """,
}
MACHINES: dict[str, tuple[Transitions[Any], type[StrEnum]]] = {
    "run": (RUN, RunState),
    "task": (TASK, TaskState),
    "attempt": (ATTEMPT, AttemptState),
    "experience": (EXPERIENCE, ExperienceState),
    "adapter": (ADAPTER, AdapterState),
    "campaign": (CAMPAIGN, CampaignState),
}


def design(entity: str) -> dict[str, set[str]]:
    lines = (line.partition(":") for line in DESIGN[entity].strip().splitlines())
    return {old.strip(): set(following.split()) for old, _, following in lines}


def pairs(entity: str) -> list[tuple[str, str, bool]]:
    """(old state, new state, whether DESIGN allows it) for every pair."""
    table = design(entity)
    return [(old, new, new in table[old]) for old in table for new in table]


@pytest.mark.parametrize("entity", DESIGN)
def test_table_of_the_code_is_the_one_in_the_design(entity: str) -> None:
    machine, states = MACHINES[entity]
    table = design(entity)
    assert set(table) == {state.value for state in states}
    assert {old.value: {new.value for new in following} for old, following in machine.table.items()} == table
    ended = {old for old, following in table.items() if not following} | ({"deployed"} if entity == "run" else set())
    assert {state.value for state in machine.finished} == ended
    for old, new, allowed in pairs(entity):
        assert machine.allows(states(old), states(new)) is allowed, (old, new)
        if not allowed:
            with pytest.raises(InvalidTransition, match=f"{entity} some-id is {old} and cannot become {new}"):
                machine.check("some-id", states(old), states(new))


# --- every pair through the real setter, on both databases ---

Move = Callable[[], None]


def _of_run(tx: Tx, old: str, new: str, number: int) -> tuple[str, Move]:
    run = a_run(tx, RunState(old), dataset_id=_shared_dataset(tx))
    return run.id, lambda: void(runs.move(tx, run.id, RunState(new), actor=ACTOR, reason="why"))


def _of_task(tx: Tx, old: str, new: str, number: int) -> tuple[str, Move]:
    if old == "leased":
        task_id = a_task(tx)
        lease = claim_of(tx, task_id).lease
        # a lease goes with the end of its attempt
        return task_id, lambda: tasks.end_by(
            tx, lease, AttemptState.INTERRUPTED, TaskState(new), actor=ACTOR, reason="why"
        )
    task_id = a_task(tx, TaskState(old))
    if (old, new) == ("waiting", "leased"):  # the one door to a lease is claim
        return task_id, lambda: void(claim_of(tx, task_id, worker=ACTOR))
    return task_id, lambda: tasks.move(tx, task_id, TaskState(new), actor=ACTOR, reason="why")


def _of_attempt(tx: Tx, old: str, new: str, number: int) -> tuple[str, Move]:
    lease = claim_of(tx, a_task(tx)).lease
    force(tx, tables.attempts, lease.attempt_id, state=old, ended_at=None if old == "open" else tx.now)
    return lease.attempt_id, lambda: tasks.end_by(
        tx, lease, AttemptState(new), TaskState.CANCELLED, actor=ACTOR, reason="why"
    )


def _of_experience(tx: Tx, old: str, new: str, number: int) -> tuple[str, Move]:
    owner = _shared_dataset(tx)
    experience_id = an_experience(tx, ExperienceState(old), dataset_id=owner)
    dataset_id = owner if new in ("reserved", "consumed") else None
    return experience_id, lambda: experiences.move(
        tx, experience_id, ExperienceState(new), actor=ACTOR, reason="why", dataset_id=dataset_id
    )


def _of_adapter(tx: Tx, old: str, new: str, number: int) -> tuple[str, Move]:
    adapter = an_adapter(tx, AdapterState(old), profile=f"profile-{number}")
    return adapter.id, lambda: adapters.move(tx, adapter.id, AdapterState(new), actor=ACTOR, reason="why")


def _of_campaign(tx: Tx, old: str, new: str, number: int) -> tuple[str, Move]:
    campaign = a_campaign(tx, CampaignState(old), profile=f"profile-{number}")
    return campaign.id, lambda: campaigns.move(tx, campaign.id, CampaignState(new), actor=ACTOR, reason="why")


SETTERS: dict[str, tuple[sa.Table, Callable[[Tx, str, str, int], tuple[str, Move]]]] = {
    "run": (tables.runs, _of_run),
    "task": (tables.tasks, _of_task),
    "attempt": (tables.attempts, _of_attempt),
    "experience": (tables.experiences, _of_experience),
    "adapter": (tables.adapters, _of_adapter),
    "campaign": (tables.campaigns, _of_campaign),
}


def void(value: object) -> None:
    """Only the effect of a call counts."""


def _shared_dataset(tx: Tx) -> str:
    row = tx.first(sa.select(tables.datasets.c.id).limit(1))
    return a_dataset(tx) if row is None else str(row["id"])


def _row(tx: Tx, table: sa.Table, row_id: str) -> dict[str, Any]:
    row = tx.first(sa.select(table).where(table.c.id == row_id))
    assert row is not None
    return dict(row)


def _num_events(tx: Tx) -> int:
    return int(tx.conn.execute(sa.select(sa.func.count()).select_from(tables.events)).scalar_one())


@pytest.mark.parametrize("entity", SETTERS)
def test_setter_allowed_pair_moves_and_writes_one_event_refused_pair_changes_nothing(
    database: Database, entity: str
) -> None:
    table, prepare = SETTERS[entity]
    with database.write() as tx:
        a_profile(tx)
        for number, (old, new, allowed) in enumerate(pairs(entity)):
            row_id, move = prepare(tx, old, new, number)
            before, num_events, moved_before = _row(tx, table, row_id), _num_events(tx), moves(tx, entity, row_id)
            if allowed:
                move()
                assert _row(tx, table, row_id)["state"] == new, (old, new)
                added = moves(tx, entity, row_id)[len(moved_before) :]
                assert [(e.old_state, e.new_state, e.actor) for e in added] == [(old, new, ACTOR)]
            else:
                with pytest.raises(InvalidTransition):
                    move()
                assert _row(tx, table, row_id) == before, (old, new)
                assert _num_events(tx) == num_events, (old, new)


# --- how a run ends: its data and the campaign's counters ---

ENDS = """
    deployed     watching    consumed   success
    completed    evaluating  consumed   success
    rejected     evaluating  counted    rejection
    rolled_back  watching    counted    rejection
    failed       training    released   failure
    validated    training    released   none
    cancelled    queued      released   none
    skipped      queued      released   none
"""
"""DESIGN's table: end, a state before it, its data, the campaign's counters."""
CELLS = [tuple(line.split()) for line in ENDS.strip().splitlines()]


def test_table_of_ends_names_every_finished_state() -> None:
    assert {cell[0] for cell in CELLS} == {state.value for state in RUN.finished}


def _run_with_data(tx: Tx, before: str, *, num: int = 3, dataset_id: str | None = None) -> tuple[Run, list[str]]:
    """A run of a campaign, about to end, whose dataset has reserved `num` experiences."""
    owner = dataset_id or a_dataset(tx)
    ids = [an_experience(tx) for _ in range(num)]
    experiences.reserve(tx, ids, owner, actor=ACTOR)
    campaign = campaigns.in_force(tx, PROFILE) or a_campaign(tx)
    return a_run(tx, RunState(before), dataset_id=owner, campaign_id=campaign.id), ids


@pytest.mark.parametrize(("end", "before", "data", "counters"), CELLS)
def test_end_of_run_settles_data_and_counters(
    database: Database, end: str, before: str, data: str, counters: str
) -> None:
    with database.write() as tx:
        run, ids = _run_with_data(tx, before)
        adapter = an_adapter(tx, run_id=run.id) if before in ("evaluating", "watching") else None
        other = an_experience(tx, ExperienceState.RESERVED)
        lifecycle.finish(tx, run, RunState(end), actor=ACTOR, reason="it ended")

    with database.read() as tx:
        ended = runs.get(tx, run.id)
        assert (ended.state, ended.reason, ended.finished_at is not None) == (end, "it ended", True)
        for experience in (experiences.get(tx, i) for i in ids):
            if data == "consumed":
                assert experience.state is ExperienceState.CONSUMED
                assert adapter is not None
                owners = (experience.dataset_id, experience.run_id, experience.adapter_id)
                assert owners == (run.dataset_id, run.id, adapter.id)
            else:
                assert experience.state is ExperienceState.COLLECTED
                assert (experience.dataset_id, experience.run_id, experience.adapter_id) == (None, None, None)
            assert experience.num_rejections == (1 if data == "counted" else 0)
            assert not experience.in_review
            [last] = moves(tx, "experience", experience.id)[1:]
            assert (last.old_state, last.new_state, last.actor) == ("reserved", experience.state, ACTOR)
        assert experiences.get(tx, other).state is ExperienceState.RESERVED  # another dataset's
        assert run.campaign_id is not None
        kept = campaigns.get(tx, run.campaign_id).counters
        assert len(kept.failures) == (1 if counters == "failure" else 0)
        assert kept.num_rejections == (1 if counters == "rejection" else 0)
        assert (kept.last_rejected_at is not None) == (counters == "rejection")
        assert (kept.last_success_at is not None) == (counters == "success")


@pytest.mark.parametrize(("first", "second", "then"), [
    ("failed", "completed", "consumed"),
    ("failed", "cancelled", "collected"),
    ("rejected", "failed", "collected"),
    ("rejected", "completed", "consumed"),
    ("completed", "failed", "consumed"),
    ("completed", "rejected", "consumed"),
])  # fmt: skip
def test_two_unfinished_runs_on_one_dataset_share_its_reservation(
    database: Database, first: str, second: str, then: str
) -> None:
    before = {"failed": "training", "cancelled": "queued", "completed": "evaluating", "rejected": "evaluating"}
    with database.write() as tx:
        run, ids = _run_with_data(tx, before[first])
        other = a_run(tx, RunState(before[second]), dataset_id=run.dataset_id)
        lifecycle.finish(tx, run, RunState(first), actor=ACTOR, reason="first")
        states = {experiences.get(tx, i).state for i in ids}
        assert states == {ExperienceState.CONSUMED if first == "completed" else ExperienceState.RESERVED}
        lifecycle.finish(tx, other, RunState(second), actor=ACTOR, reason="second")
        assert {experiences.get(tx, i).state for i in ids} == {ExperienceState(then)}
        rejections = (first == "rejected") + (second == "rejected")
        assert {experiences.get(tx, i).num_rejections for i in ids} == {rejections}


@pytest.mark.parametrize("end", ["failed", "rejected"])
def test_two_runs_of_one_dataset_ending_at_once_release_its_data_and_count_both(
    postgres_database: Database, end: str
) -> None:
    """Each sees the other as unfinished until it commits: one of them must wait, or nobody releases the data."""
    database, before = postgres_database, {"failed": "training", "rejected": "evaluating"}[end]
    with database.write() as tx:
        run, ids = _run_with_data(tx, before)
        other = a_run(tx, RunState(before), dataset_id=run.dataset_id)

    def end_other() -> None:
        with database.write() as tx:
            lifecycle.finish(tx, other, RunState(end), actor=ACTOR, reason="second")

    thread = threading.Thread(target=end_other)
    with database.write() as tx:
        lifecycle.finish(tx, run, RunState(end), actor=ACTOR, reason="first")
        thread.start()
        thread.join(0.3)
    thread.join(10)
    with database.read() as tx:
        found = [experiences.get(tx, i) for i in ids]
    assert {experience.state for experience in found} == {ExperienceState.COLLECTED}
    counted = end == "rejected"
    assert {(e.num_rejections, e.in_review) for e in found} == {(2, True) if counted else (0, False)}


def test_second_rejection_sends_experiences_to_review_where_nothing_reserves_them(database: Database) -> None:
    with database.write() as tx:
        run, ids = _run_with_data(tx, "evaluating")
        lifecycle.finish(tx, run, RunState.REJECTED, actor=ACTOR, reason="worse")
        again = a_dataset(tx)
        experiences.reserve(tx, ids, again, actor=ACTOR)
        second = a_run(tx, RunState.WATCHING, dataset_id=again)
        lifecycle.finish(tx, second, RunState.ROLLED_BACK, actor=ACTOR, reason="bad looks")
        for experience in (experiences.get(tx, i) for i in ids):
            assert (experience.state, experience.num_rejections) == (ExperienceState.COLLECTED, 2)
            assert experience.in_review
    with pytest.raises(Refused, match="waits for a review"), database.write() as tx:
        experiences.reserve(tx, [an_experience(tx), ids[0]], a_dataset(tx), actor=ACTOR)
    with database.read() as tx:
        num = sa.select(sa.func.count()).where(tables.experiences.c.state == "reserved")
        assert tx.conn.execute(num).scalar_one() == 0  # all of them or none


def test_rolled_back_after_deployment_gives_the_data_back_and_counts(database: Database) -> None:
    with database.write() as tx:
        run, ids = _run_with_data(tx, "watching")
        adapter = an_adapter(tx, AdapterState.LIVE, run_id=run.id)
        lifecycle.finish(tx, run, RunState.DEPLOYED, actor=ACTOR, reason="healthy")
        assert {experiences.get(tx, i).state for i in ids} == {ExperienceState.CONSUMED}
        lifecycle.roll_back(tx, PROFILE, actor=ACTOR, reason="people complained")
        for experience in (experiences.get(tx, i) for i in ids):
            assert (experience.state, experience.num_rejections) == (ExperienceState.COLLECTED, 1)
        ended = runs.get(tx, run.id)
        assert (ended.state, ended.reason) == (RunState.ROLLED_BACK, "people complained")  # what is so now
        assert ended.finished_at is not None
        assert adapters.get(tx, adapter.id).state is AdapterState.ROLLED_BACK


def test_forgotten_experience_is_left_alone_by_the_end_of_its_run(database: Database) -> None:
    with database.write() as tx:
        run, ids = _run_with_data(tx, "evaluating")
        experiences.move(tx, ids[0], ExperienceState.FORGOTTEN, actor=ACTOR, reason="asked to")
        lifecycle.finish(tx, run, RunState.COMPLETED, actor=ACTOR, reason="done")
        assert experiences.get(tx, ids[0]).state is ExperienceState.FORGOTTEN
        assert experiences.get(tx, ids[1]).state is ExperienceState.CONSUMED


# --- the breaker, through real ends of runs ---


def _end_one(database: Database, end: str, before: str = "training") -> str:
    with database.write() as tx:
        run, _ = _run_with_data(tx, before, num=1)
        lifecycle.finish(tx, run, RunState(end), actor=ACTOR, reason="test")
    assert run.campaign_id is not None
    return run.campaign_id


def _breaker(database: Database, campaign_id: str) -> Breaker:
    with database.read() as tx:
        return breaker(campaigns.get(tx, campaign_id).counters, tx.now)


def test_breaker_opens_at_three_failures_is_half_open_after_cooldown_and_closes_on_success(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = clock.utc_now()
    monkeypatch.setattr(clock, "utc_now", lambda: now)
    for expected in (Breaker.CLOSED, Breaker.CLOSED, Breaker.OPEN):
        campaign_id = _end_one(database, "failed")
        assert _breaker(database, campaign_id) is expected
    now += timedelta(hours=5, minutes=59)
    assert _breaker(database, campaign_id) is Breaker.OPEN
    now += timedelta(minutes=1)
    assert _breaker(database, campaign_id) is Breaker.HALF_OPEN
    _end_one(database, "failed")
    assert _breaker(database, campaign_id) is Breaker.OPEN  # the one that might try failed: open again
    _end_one(database, "completed", before="evaluating")
    assert _breaker(database, campaign_id) is Breaker.CLOSED
    with database.read() as tx:
        assert campaigns.get(tx, campaign_id).counters.failures == ()


def test_breaker_forgets_failures_older_than_seven_days(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock.utc_now()
    monkeypatch.setattr(clock, "utc_now", lambda: now)
    _end_one(database, "failed")
    now += timedelta(days=3)
    _end_one(database, "failed")
    now += timedelta(days=4)  # the first is seven days old: forgotten
    campaign_id = _end_one(database, "failed")
    assert _breaker(database, campaign_id) is Breaker.CLOSED
    _end_one(database, "failed")
    assert _breaker(database, campaign_id) is Breaker.OPEN
    now += timedelta(days=7)
    assert _breaker(database, campaign_id) is Breaker.CLOSED


def test_breaker_is_never_touched_by_rejections_or_ends_without_effect(database: Database) -> None:
    for end, before in [("rejected", "evaluating"), ("rolled_back", "watching"), ("cancelled", "queued")] * 4:
        campaign_id = _end_one(database, end, before)
    for end, before in [("skipped", "queued"), ("validated", "training")] * 4:
        _end_one(database, end, before)
    assert _breaker(database, campaign_id) is Breaker.CLOSED
    with database.read() as tx:
        counters = campaigns.get(tx, campaign_id).counters
    assert (counters.failures, counters.num_rejections) == ((), 8)


def test_breaker_keeps_its_failures_when_a_rejection_comes_between(database: Database) -> None:
    for end, before in [("failed", "training"), ("rejected", "evaluating")] * 3:
        campaign_id = _end_one(database, end, before)
    assert _breaker(database, campaign_id) is Breaker.OPEN
