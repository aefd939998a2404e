"""What a rolled-back adapter had learnt is free again, unless another run on the same dataset has a claim on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from support import tables
from support.learning_checks import consumed_by_a_success_only, history_ends_where_it_is
from support.learning_world import World
from support.rows import a_run
from support.workspaces import PROFILE
from tunesmith.core.errors import Refused
from tunesmith.deployment import queries as deployments
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Database

NEVER = ["deploy.when=never"]


@pytest.fixture
def world(tmp_path: Path, store_url: str) -> World:  # type: ignore[misc]
    made = World(tmp_path, store_url)
    yield made
    made.close()


def _dataset(world: World, num: int = 16) -> str:
    for number in range(num):
        talk = [
            {"role": "user", "content": f"Tell me about the town {number}"},
            {"role": "assistant", "content": f"The town {number} is old."},
        ]
        world.client.experiences.add(PROFILE, talk)
    return world.client.datasets.assemble(PROFILE, max_examples=40)[0].id


def _ended(world: World, dataset_id: str, end: RunState) -> str:
    overrides = NEVER if end is RunState.COMPLETED else []
    run_id = world.client.runs.submit(PROFILE, dataset_id, overrides=overrides, start="base").id
    assert world.finish(run_id, end) is end
    return run_id


def _states(world: World) -> Counter[tuple[str, str | None]]:
    rows = world.seen().experiences.values()
    return Counter((row["state"], row["dataset_id"]) for row in rows if row["state"] != "forgotten")


@pytest.mark.slow
def test_unfinished_run_on_its_dataset_keeps_the_reservation(world: World) -> None:
    dataset_id = _dataset(world)
    _ended(world, dataset_id, RunState.DEPLOYED)
    other = world.client.runs.submit(PROFILE, dataset_id, start="base").id
    world.client.adapters.rollback(PROFILE)
    assert set(_states(world)) == {("reserved", dataset_id)}
    with pytest.raises(Refused, match="reserved by another dataset"):
        world.client.datasets.assemble(PROFILE)
    world.client.runs.cancel(other)
    assert set(_states(world)) == {("collected", None)}


def test_unfinished_run_that_is_deployed_later_consumes(world: World) -> None:
    dataset_id = _dataset(world)
    _ended(world, dataset_id, RunState.DEPLOYED)
    other = world.client.runs.submit(PROFILE, dataset_id, start="base").id
    world.client.adapters.rollback(PROFILE)
    assert world.finish(other, RunState.DEPLOYED) is RunState.DEPLOYED
    assert {row["run_id"] for row in world.seen().experiences.values()} == {other}


def test_completed_run_on_its_dataset_has_learnt_it_too(world: World) -> None:
    dataset_id = _dataset(world)
    _ended(world, dataset_id, RunState.DEPLOYED)
    completed = _ended(world, dataset_id, RunState.COMPLETED)
    world.client.adapters.rollback(PROFILE)
    assert set(_states(world)) == {("consumed", dataset_id)}
    assert {row["run_id"] for row in world.seen().experiences.values()} == {completed}
    assert {row["adapter_id"] for row in world.seen().experiences.values()} == {world.adapter_of(completed).id}


def _again(world: World, run_id: str) -> str:
    """The version that a run made goes live again, past the gate; the run that brought it."""
    again = world.client.adapters.deploy(world.adapter_of(run_id).id, force=True, reason="it was not the model").id
    assert world.finish(again, RunState.DEPLOYED) is RunState.DEPLOYED, world.run(again).reason
    return again


def test_version_that_goes_live_again_has_learnt_its_data_again_until_it_is_rolled_back_again(world: World) -> None:
    dataset_id = _dataset(world)
    first = _ended(world, dataset_id, RunState.DEPLOYED)
    adapter_id = world.adapter_of(first).id
    world.client.adapters.rollback(PROFILE)
    assert set(_states(world)) == {("collected", None)}
    again = _again(world, first)
    assert set(_states(world)) == {("consumed", dataset_id)}
    rows = world.seen().experiences.values()
    assert {(row["run_id"], row["adapter_id"]) for row in rows} == {(again, adapter_id)}
    assert [told.states for told in world.client.experiences.stats(PROFILE)] == [{"consumed": len(rows)}]
    with pytest.raises(Refused, match=r"only 0 new experiences .* learnt already"):
        world.client.datasets.assemble(PROFILE)
    world.client.adapters.rollback(PROFILE)
    assert set(_states(world)) == {("collected", None)}
    consumed_by_a_success_only(world.seen())
    history_ends_where_it_is(world.seen())


def test_what_others_have_taken_meanwhile_stays_theirs_when_a_version_goes_live_again(world: World) -> None:
    dataset_id = _dataset(world)
    first = _ended(world, dataset_id, RunState.DEPLOYED)
    world.client.adapters.rollback(PROFILE)
    other = world.client.datasets.assemble(PROFILE, max_examples=3, seed=3)[0].id
    taken = {row["experience_id"] for row in world.seen().new_of(other)}
    free = {row["experience_id"] for row in world.seen().new_of(dataset_id)} - taken
    assert taken
    assert free
    world.client.experiences.review(sorted(free)[:1], "reject", reason="a real name")
    _again(world, first)
    rows = world.seen().experiences
    assert {rows[each]["state"] for each in taken} == {"reserved"}
    assert {rows[each]["dataset_id"] for each in taken} == {other}
    assert {rows[each]["state"] for each in free} == {"consumed"}, "it has learnt what was rejected since, too"
    assert {rows[each]["dataset_id"] for each in free} == {dataset_id}


def test_version_that_went_live_again_and_was_superseded_keeps_what_the_next_one_gives_back(world: World) -> None:
    dataset_id = _dataset(world)
    first = _ended(world, dataset_id, RunState.DEPLOYED)
    world.client.adapters.rollback(PROFILE)
    second = _ended(world, dataset_id, RunState.DEPLOYED)
    again = _again(world, first)
    assert {row["run_id"] for row in world.seen().experiences.values()} == {second}, "learnt by the other one already"
    _again(world, second)
    world.client.adapters.rollback(PROFILE)
    assert set(_states(world)) == {("consumed", dataset_id)}
    rows = world.seen().experiences.values()
    assert {(row["run_id"], row["adapter_id"]) for row in rows} == {(again, world.adapter_of(first).id)}


@pytest.mark.slow
def test_run_on_a_dataset_with_something_that_a_person_rejected_since_is_refused(world: World) -> None:
    """Also where an earlier run has consumed it, or where it is only replayed."""
    first = _dataset(world)
    _ended(world, first, RunState.COMPLETED)
    for number in range(30, 60):
        talk = [{"role": "user", "content": f"And the town {number}?"}, {"role": "assistant", "content": "It is new."}]
        world.client.experiences.add(PROFILE, talk)
    second = world.client.datasets.assemble(PROFILE, max_examples=20)[0].id
    replayed = [row["experience_id"] for row in world.seen().members if row["role"] == "replay"]
    assert replayed
    world.client.experiences.review(replayed[:1], "reject", reason="a real name")
    for dataset_id in (first, second):
        with pytest.raises(Refused, match=rf"dataset {dataset_id}: experience {replayed[0]} is quarantined"):
            world.client.runs.submit(PROFILE, dataset_id)
    world.client.experiences.review(replayed[:1], "accept", reason="a made-up name")
    assert world.client.runs.submit(PROFILE, second).is_new


def test_run_is_submitted_while_a_flip_holds_its_profile(postgres_database: Database) -> None:
    """The one has locked the dataset and adds a row of the profile; the other goes the opposite way."""
    with postgres_database.write() as tx:
        dataset_id = a_run(tx, RunState.COMPLETED).dataset_id
    with postgres_database.write() as flipping, postgres_database.write() as submitting:
        deployments.lock(flipping, PROFILE)
        submitting.conn.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
        spec = submitting.first(sa.select(tables.runs.c.id).where(tables.runs.c.dataset_id == dataset_id))
        assert spec is not None
        submitting.run(
            tables.tasks.insert().values(
                id="tk-1", kind="train", run_id=spec["id"], profile=PROFILE, state="waiting", reason="", priority=1,
                payload={}, num_attempts=0, num_crashes=0, num_errors=0, num_shrinks=0, created_at=submitting.now,
            )
        )  # fmt: skip
