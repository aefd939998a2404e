"""What is live: flips by compare-and-swap, rollbacks in one step, and nothing flipped while a watch is open."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import ACTOR, PROFILE, WORKER, a_claimed_run, a_profile, a_run, a_task, an_adapter, dump, moves
from tunesmith.core.errors import Refused
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.queries import LiveMoved
from tunesmith.evaluation.rules.gate import BARE_BASE
from tunesmith.models import listings
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.programs.stage import Looked, StageEnd
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import ErrorClass, TaskKind
from tunesmith.store.database import Database, Tx

TARGETS = [{"name": "directory", "kind": "directory", "options": {}}]


def _flip(tx: Tx, adapter: Adapter, baseline: str) -> None:
    deployments.flip(tx, adapter, baseline=baseline, targets=TARGETS, actor=ACTOR, reason="test")


def _live_versions(database: Database, num: int) -> list[Adapter]:
    """`num` versions, each of which was live in turn; the last one is."""
    made: list[Adapter] = []
    with database.write() as tx:
        for _ in range(num):
            adapter = an_adapter(tx)
            _flip(tx, adapter, made[-1].digest if made else BARE_BASE)
            made.append(adapter)
    return made


def _states(database: Database, *some: Adapter) -> list[str]:
    with database.read() as tx:
        return [adapters.get(tx, adapter.id).state.value for adapter in some]


def test_flip_from_base_makes_the_adapter_live(database: Database) -> None:
    with database.write() as tx:
        adapter = an_adapter(tx)
        assert deployments.live_digest(tx, PROFILE) == BARE_BASE
        _flip(tx, adapter, BARE_BASE)
    with database.read() as tx:
        assert deployments.live_digest(tx, PROFILE) == adapter.digest
        deployment = deployments.get(tx, PROFILE)
        assert deployment is not None
        assert (deployment.wanted_adapter_id, deployment.previous_adapter_id) == (adapter.id, None)
        assert (deployment.flipped_by, deployment.targets) == (ACTOR, TARGETS)
        assert [(e.old_state, e.new_state) for e in moves(tx, "adapter", adapter.id)] == [("candidate", "live")]


def test_flip_supersedes_what_was_live_and_keeps_it_for_rollback(database: Database) -> None:
    first, second = _live_versions(database, 2)
    assert _states(database, first, second) == ["superseded", "live"]
    with database.read() as tx:
        deployment = deployments.get(tx, PROFILE)
    assert deployment is not None
    assert (deployment.wanted_adapter_id, deployment.previous_adapter_id) == (second.id, first.id)


@pytest.mark.parametrize("baseline", [BARE_BASE, "digest-of-something-else"])
def test_flip_against_another_baseline_is_refused_and_changes_nothing(database: Database, baseline: str) -> None:
    _live_versions(database, 1)
    with database.write() as tx:
        candidate = an_adapter(tx)
    before = dump(database)
    with pytest.raises(LiveMoved, match="changed since the verdict"), database.write() as tx:
        _flip(tx, candidate, baseline)
    assert dump(database) == before


def test_flip_of_what_is_live_already_is_refused_and_keeps_the_way_back(database: Database) -> None:
    first, second = _live_versions(database, 2)
    before = dump(database)
    with pytest.raises(Refused, match="live already"), database.write() as tx:
        _flip(tx, adapters.get(tx, second.id), second.digest)
    assert dump(database) == before
    with database.read() as tx:
        pinned = deployments.pinned(tx, PROFILE)
        assert pinned is not None
        assert pinned.id == first.id


def test_kept_versions_are_live_the_way_back_and_candidates_under_way(database: Database) -> None:
    versions = _live_versions(database, 3)
    with database.write() as tx:
        deploying = an_adapter(tx, run_id=a_run(tx, RunState.DEPLOYING).id)
        shadowing = an_adapter(tx, run_id=a_run(tx, RunState.SHADOWING).id)
        an_adapter(tx, run_id=a_run(tx, RunState.HELD).id)
        an_adapter(tx, AdapterState.REVOKED, run_id=a_run(tx, RunState.DEPLOYING).id)
    wanted = {versions[2].name, versions[1].name, deploying.name, shadowing.name}
    with database.read() as tx:
        assert deployments.kept(tx, PROFILE) == wanted
    with database.write() as tx:
        adapters.move(tx, versions[1].id, AdapterState.REVOKED, actor=ACTOR, reason="test")
        assert deployments.kept(tx, PROFILE) == (wanted - {versions[1].name}) | {versions[0].name}


def test_targets_are_followed_by_one_task_that_pauses_until_they_answer(database: Database) -> None:
    _live_versions(database, 1)

    def opened() -> list[tuple[str, bool]]:
        with database.read() as tx:
            query = sa.select(tables.tasks).where(tables.tasks.c.kind == TaskKind.RECONCILE)
            return [(row["state"], row["available_at"] is not None) for row in tx.all(query)]

    with database.write() as tx:
        deployments.request_reconcile(tx, PROFILE, actor=ACTOR)
        deployments.request_reconcile(tx, PROFILE, actor=ACTOR)
    assert opened() == [("waiting", False)]
    with database.write() as tx:
        claim = tasks.claim(tx, WORKER, [TaskKind.RECONCILE], 30.0)
        assert claim is not None
        deployments.request_reconcile(tx, PROFILE, actor=ACTOR, at_once=True)
        lifecycle.settle(tx, claim, StageEnd.failed(ErrorClass.TRANSIENT, "it is down"), actor=WORKER)
    assert opened() == [("waiting", True)]
    with database.write() as tx:
        deployments.request_reconcile(tx, PROFILE, actor=ACTOR)
    assert opened() == [("waiting", True)], "it is still down: no second task, no shorter pause"
    with database.write() as tx:
        deployments.request_reconcile(tx, PROFILE, actor=ACTOR, at_once=True)
    assert opened() == [("waiting", False)], "it answers again"


def test_targets_looked_at_by_many_at_once_have_one_task(database: Database) -> None:
    _live_versions(database, 1)

    def look() -> None:
        with database.write() as tx:
            deployments.request_reconcile(tx, PROFILE, actor=ACTOR, at_once=True)

    _in_threads([look] * 8)
    with database.read() as tx:
        assert len(tx.all(sa.select(tables.tasks.c.id).where(tables.tasks.c.kind == TaskKind.RECONCILE))) == 1


def test_flip_is_refused_while_a_watch_is_open(database: Database) -> None:
    with database.write() as tx:
        candidate = an_adapter(tx)
        watched = a_run(tx, RunState.WATCHING)
    before = dump(database)
    with pytest.raises(Refused, match=watched.id), database.write() as tx:
        _flip(tx, candidate, BARE_BASE)
    assert dump(database) == before
    with database.write() as tx:
        runs.move(tx, watched.id, RunState.DEPLOYED, actor=ACTOR, reason="healthy")
        _flip(tx, candidate, BARE_BASE)


def test_flip_is_refused_between_another_runs_flip_and_its_watch(database: Database) -> None:
    with database.write() as tx:
        deploying = a_run(tx, RunState.DEPLOYING)
        first, second = an_adapter(tx, run_id=deploying.id), an_adapter(tx)
        _flip(tx, first, BARE_BASE)
    before = dump(database)
    with pytest.raises(Refused, match=deploying.id), database.write() as tx:
        _flip(tx, second, first.digest)  # judged against the new live one already
    assert dump(database) == before
    with database.write() as tx:
        runs.move(tx, deploying.id, RunState.WATCHING, actor=ACTOR, reason="flipped")
        runs.move(tx, deploying.id, RunState.DEPLOYED, actor=ACTOR, reason="healthy")
        _flip(tx, second, first.digest)


def test_flip_of_one_profile_leaves_others_alone(database: Database) -> None:
    with database.write() as tx:
        ours, theirs = an_adapter(tx), an_adapter(tx, profile="other")
        a_run(tx, RunState.WATCHING, profile="other")
        _flip(tx, ours, BARE_BASE)
        assert deployments.live_digest(tx, "other") == BARE_BASE
        assert adapters.get(tx, theirs.id).state is AdapterState.CANDIDATE


def test_two_flips_racing_from_the_same_baseline_one_wins(database: Database) -> None:
    with database.write() as tx:
        candidates = [an_adapter(tx) for _ in range(6)]
    start, won, lost = threading.Barrier(6), [], []

    def flip(candidate: Adapter) -> None:
        start.wait()
        try:
            with database.write() as tx:
                _flip(tx, candidate, BARE_BASE)
            won.append(candidate.id)
        except LiveMoved:
            lost.append(candidate.id)

    _in_threads([lambda c=c: flip(c) for c in candidates])  # type: ignore[misc]
    assert (len(won), len(lost)) == (1, 5)
    with database.read() as tx:
        live = adapters.live(tx, PROFILE)
    assert live is not None
    assert live.id == won[0]


def test_roll_back_goes_to_the_version_before_then_to_the_one_before_that_then_to_base(database: Database) -> None:
    first, second, third = _live_versions(database, 3)
    with database.write() as tx:
        assert deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="bad") == second.id
        assert deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="bad too") == first.id
        assert deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="all bad") is None
        assert deployments.live_digest(tx, PROFILE) == BARE_BASE
        deployment = deployments.get(tx, PROFILE)
        assert deployment is not None
        assert (deployment.wanted_adapter_id, deployment.targets) == (None, TARGETS)  # the targets follow to base
    assert _states(database, first, second, third) == ["rolled_back"] * 3
    before = dump(database)
    with pytest.raises(Refused, match="nothing to roll back"), database.write() as tx:
        deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="again")
    assert dump(database) == before


def test_roll_back_steps_over_a_revoked_version(database: Database) -> None:
    first, second, _third = _live_versions(database, 3)
    with database.write() as tx:
        adapters.move(tx, second.id, AdapterState.REVOKED, actor=ACTOR, reason="leaks")
        assert deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="bad") == first.id


def test_roll_back_finds_an_old_version_behind_many_that_never_went_live(database: Database) -> None:
    first, second = _live_versions(database, 2)
    with database.write() as tx:
        third = an_adapter(tx)
        _flip(tx, third, second.digest)
        adapters.move(tx, second.id, AdapterState.REVOKED, actor=ACTOR, reason="leaks")
        for _ in range(101):
            an_adapter(tx)
        assert deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="bad") == first.id


def test_roll_back_to_a_named_version(database: Database) -> None:
    first, second, third = _live_versions(database, 3)
    with database.write() as tx:
        assert deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="x", to=adapters.get(tx, first.id)) == first.id
    assert _states(database, first, second, third) == ["live", "superseded", "rolled_back"]


@pytest.mark.parametrize(
    "state", [AdapterState.CANDIDATE, AdapterState.LIVE, AdapterState.ROLLED_BACK, AdapterState.REVOKED]
)
def test_roll_back_to_what_was_never_live_or_is_gone_is_refused(database: Database, state: AdapterState) -> None:
    (live,) = _live_versions(database, 1)
    with database.write() as tx:
        to = adapters.get(tx, live.id) if state is AdapterState.LIVE else an_adapter(tx, state)
    before = dump(database)
    with pytest.raises(Refused, match="only one that was live before"), database.write() as tx:
        deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="x", to=to)
    assert dump(database) == before


def test_roll_back_to_another_profiles_version_is_refused(database: Database) -> None:
    _live_versions(database, 1)
    with database.write() as tx:
        foreign = an_adapter(tx, AdapterState.SUPERSEDED, profile="other")
    before = dump(database)
    with pytest.raises(Refused, match="other"), database.write() as tx:
        deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="x", to=foreign)
    assert dump(database) == before


def test_roll_back_of_a_profile_with_nothing_live_is_refused(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
    with pytest.raises(Refused, match="nothing to roll back"), database.write() as tx:
        lifecycle.roll_back(tx, PROFILE, actor=ACTOR, reason="x")


def test_roll_back_opens_the_task_that_brings_the_targets_along(database: Database) -> None:
    first, _second = _live_versions(database, 2)
    with database.write() as tx:
        a_task(tx, priority=0)
        assert lifecycle.roll_back(tx, PROFILE, actor=ACTOR, reason="bad") == first.id
        claim = tasks.claim(tx, WORKER, [TaskKind.RECONCILE], 30.0)
    assert claim is not None
    assert (claim.task.profile, claim.task.run_id, claim.task.priority) == (PROFILE, None, 0)


@pytest.mark.parametrize("first_to_act", ["worker", "person"])
def test_person_and_watch_rolling_back_at_once_take_one_step_back_not_two(
    postgres_database: Database, first_to_act: str
) -> None:
    """Both saw the second version live and bad. Whoever comes second must not take out the version before it."""
    database = postgres_database
    [first] = _live_versions(database, 1)
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.WATCHING, TaskKind.WATCH)
        second = an_adapter(tx, run_id=run.id)
        adapters.move(tx, first.id, AdapterState.SUPERSEDED, actor=ACTOR, reason="test")
        adapters.move(tx, second.id, AdapterState.LIVE, actor=ACTOR, reason="test")
    refused: list[str] = []

    def person(tx: Tx) -> None:
        try:
            lifecycle.roll_back(tx, PROFILE, actor=ACTOR, reason="by hand")
        except LiveMoved as error:
            refused.append(str(error))

    def worker(tx: Tx) -> None:
        lifecycle.settle(tx, claim, StageEnd.succeeded(Looked("roll_back", "bad looks")), actor=WORKER)

    one, other = (worker, person) if first_to_act == "worker" else (person, worker)

    def act_second() -> None:
        with database.write() as tx:
            other(tx)

    thread = threading.Thread(target=act_second)
    with database.write() as tx:
        one(tx)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()  # it waits for the first to commit
    thread.join(10)
    with database.read() as tx:
        live = adapters.live(tx, PROFILE)
        assert live is not None
        assert live.id == first.id
        assert runs.get(tx, run.id).state is RunState.ROLLED_BACK
    assert _states(database, second) == ["rolled_back"]
    assert len(refused) == (1 if first_to_act == "worker" else 0)


def test_versions_are_numbered_per_profile_without_gaps_or_twins(database: Database) -> None:
    with database.write() as tx:
        made = [a_run(tx, RunState.TRAINING) for _ in range(8)]
        an_adapter(tx, profile="other")

    def register(run_id: str) -> None:
        with database.write() as tx:
            an_adapter(tx, run_id=run_id)

    _in_threads([lambda r=run.id: register(r) for run in made])  # type: ignore[misc]
    with database.read() as tx:
        assert sorted(adapter.version for adapter in listings.adapters(tx, profile=PROFILE, limit=100)) == list(
            range(1, 9)
        )
        assert [adapter.version for adapter in listings.adapters(tx, profile="other", limit=100)] == [1]
        assert adapters.find(tx, f"{PROFILE}@v3").version == 3


def test_observation_is_noted_with_an_event_only_when_it_changes(database: Database) -> None:
    with database.write() as tx:
        adapter = an_adapter(tx, AdapterState.LIVE)
        for error in (None, None, "gone", "gone", None):
            deployments.observe(tx, PROFILE, "directory", adapter_id=adapter.id, error=error)
        [seen] = deployments.observed(tx, PROFILE)
        assert (seen.observed_adapter_id, seen.error) == (adapter.id, None)
        from tunesmith.store.events import of_entity

        assert [event.reason for event in of_entity(tx, "deployment", PROFILE)] == ["", "gone", ""]


def test_observation_of_a_target_that_cannot_be_asked_keeps_what_was_last_seen(database: Database) -> None:
    with database.write() as tx:
        adapter = an_adapter(tx, AdapterState.LIVE)
        deployments.observe(tx, PROFILE, "directory", adapter_id=adapter.id)
        deployments.observe(tx, PROFILE, "directory", is_known=False, error="down")
        deployments.observe(tx, PROFILE, "old one", adapter_id=adapter.id)
        deployments.remove_other_targets(tx, PROFILE, ["directory"])
        [seen] = deployments.observed(tx, PROFILE)
        assert (seen.target, seen.observed_adapter_id, seen.error) == ("directory", adapter.id, "down")
        deployments.observe(tx, PROFILE, "directory", adapter_id=None, error="it serves the bare base")
        [seen] = deployments.observed(tx, PROFILE)
        assert (seen.observed_adapter_id, seen.error) == (None, "it serves the bare base")


def _in_threads(actions: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
