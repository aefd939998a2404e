"""The learning policy of rounds: where they start, what they learn from, and how their ends decide the next.

The scheduler opens real rounds on real datasets; how they end is written into the store as a worker does it. The story
of both starts, and those of `test_rounds.py`, have real programs in between.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.rows import ACTOR, a_comparison, a_judgement, a_run, an_adapter, force
from support.workspaces import PROFILE, a_profile, cli
from tunesmith.core.errors import Refused
from tunesmith.deployment import queries as deployments
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.experience.queries import members
from tunesmith.orchestration import lifecycle
from tunesmith.orchestration.rounds.facts import round_status
from tunesmith.orchestration.rounds.open import open_round
from tunesmith.orchestration.rounds.scheduler import Scheduler
from tunesmith.orchestration.rounds.start_point import FILES, StartPoint
from tunesmith.runs.queries import rounds as queries
from tunesmith.runs.queries import tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskState
from tunesmith.store.database import Tx

BEFORE = {RunState.DEPLOYED: RunState.WATCHING, RunState.REJECTED: RunState.EVALUATING}
EAGER: dict[str, Any] = {
    "window": "00:00-24:00",
    "cooldown_h": 0.0,
    "rejection_cooldown_h": 0.0,
    "triggers": {"new_data": {"count": 40}},
}
MIX = {"experience": {"mix": {"min_new": 10, "min_eval_examples": 0}}}


def set_profile(fleet: Fleet, quality: float, **campaign: Any) -> None:
    """What the next run will be worth, and the campaign's settings."""
    a_profile(fleet.root, options={"quality": quality, "steps": 2}, campaign={**EAGER, **campaign}, **MIX)


def talk(fleet: Fleet, first: int, num: int = 60, *, corrected: bool = False) -> set[str]:
    """New conversations; their ids."""
    before, lines = set(experiences(fleet)), []
    for number in range(first, first + num):
        question = {"role": "user", "content": f"What is {number} plus {number}?"}
        answer = {"role": "assistant", "content": f"{number} plus {number} is {2 * number}, as you can easily check."}
        lines.append(json.dumps({"messages": [question, answer]}))
    source = fleet.root / f"talk-{first}.jsonl"
    source.write_text("\n".join(lines))
    fleet.client.experiences.import_files(PROFILE, [source])
    found = set(experiences(fleet)) - before
    for each in found if corrected else ():
        fleet.client.feedback.add(each, "irrelevant", correction="Twice as much; adding a number to itself doubles it.")
    return found


def runs_of(fleet: Fleet, campaign_id: str) -> list[Run]:
    """Oldest first."""
    with fleet.database.read() as tx:
        return queries.of_campaign(tx, campaign_id, 100)[::-1]


def open_next(fleet: Fleet, campaign_id: str, **campaign: Any) -> Run:
    """Let the scheduler open one round, or one half."""
    set_profile(fleet, 0.3, **campaign)
    scheduler = Scheduler(fleet.database, fleet.client.workspace, "wk-test", 30.0)
    [run_id] = scheduler.open_due()
    scheduler.leave()
    run = runs_of(fleet, campaign_id)[-1]
    assert (run.id, run.state) == (run_id, "queued")
    return run


def a_round(fleet: Fleet, campaign_id: str, gain: float = 0.2, **campaign: Any) -> Run:
    """A round that made the loss better by this share of it, and went live; or worse, and was rejected."""
    run = open_next(fleet, campaign_id, **campaign)
    end = RunState.DEPLOYED if gain > 0 else RunState.REJECTED
    with fleet.database.write() as tx:
        end_task(tx, run)
        adapter = an_adapter(tx, run_id=run.id)
        compared = a_comparison(candidate=1.0 - gain, difference=gain)
        judged = a_judgement(run, adapter.digest, Decision.PROMOTE)
        judged = judged.model_copy(update={"report": judged.report.model_copy(update={"comparisons": (compared,)})})
        evaluations.add(
            tx, judged, run_id=run.id, adapter_id=adapter.id, baseline_adapter_id=None, scores_path="s", actor=ACTOR
        )
        if end is RunState.DEPLOYED:
            live = deployments.live_digest(tx, PROFILE)
            deployments.flip(tx, adapter, baseline=live, targets=[], actor=ACTOR, reason="better")
        force(tx, tables.runs, run.id, state=BEFORE[end])
        lifecycle.finish(tx, queries.of_campaign(tx, campaign_id, 1)[0], end, actor=ACTOR, reason="as the test wants")
    return runs_of(fleet, campaign_id)[-1]


def end_task(tx: Tx, run: Run) -> None:
    task = tasks.open_of_run(tx, run.id)
    assert task is not None
    tasks.move(tx, task.id, TaskState.CANCELLED, actor=ACTOR, reason="done by the test")


def next_of(fleet: Fleet, campaign_id: str) -> StartPoint:
    facts = fleet.client.campaigns.next_round(campaign_id).status.facts
    assert facts is not None
    assert facts.start is not None
    return facts.start


def roles(fleet: Fleet, dataset_id: str) -> Counter[tuple[str, str]]:
    with fleet.database.read() as tx:
        return Counter((member.split, member.role) for member in members.of_dataset(tx, dataset_id))


def experiences(fleet: Fleet) -> dict[str, Any]:
    with fleet.database.read() as tx:
        return {row["id"]: row for row in tx.all(sa.select(tables.experiences))}


@pytest.fixture
def fleet(make_fleet: MakeFleet, store: str | None) -> Fleet:
    made = make_fleet(store=store, settings={"worker": {"triggers_s": 600.0}})
    set_profile(made, 0.3)
    return made


@pytest.fixture
def campaign(fleet: Fleet) -> str:
    return fleet.client.campaigns.create(PROFILE, name="helpdesk").id


@ON_SQLITE
def test_refresh_learns_again_from_base_what_was_learnt_and_consumes_it_once(fleet: Fleet, campaign: str) -> None:
    learnt = talk(fleet, 0)
    first = a_round(fleet, campaign)
    consumed = {each: row for each, row in experiences(fleet).items() if row["state"] == "consumed"}
    assert set(consumed) == learnt
    talk(fleet, 100)
    second = a_round(fleet, campaign, start="base")
    assert [run.spec.start for run in (first, second)] == [None, None]
    found = roles(fleet, second.dataset_id)
    assert found["train", "replay"] == roles(fleet, first.dataset_id)["train", "gold"], "all of it again"
    assert found["train", "gold"] >= 10
    after = experiences(fleet)
    for each, row in consumed.items():
        for name in ("state", "dataset_id", "run_id", "adapter_id"):
            assert after[each][name] == row[name], "it was learnt with the first round, and stays so"
    assert Counter(row["state"] for row in after.values()) == {"consumed": 120}
    talk(fleet, 200)
    third = a_round(fleet, campaign)
    assert third.spec.start is not None, "what is live"
    found = roles(fleet, third.dataset_id)
    assert 0 < found["train", "replay"] < found["train", "gold"], "30 % of it"
    with fleet.database.read() as tx:
        one = next(each.experience_id for each in members.of_dataset(tx, second.dataset_id) if each.role == "replay")
        held_by = {member.dataset_id for member in members.of_experience(tx, one)}
    assert {first.dataset_id, second.dataset_id} <= held_by
    fleet.client.experiences.forget([one], reason="asked to")
    for dataset_id in held_by:
        _, report = fleet.client.datasets.show(dataset_id)
        assert report.earlier_fingerprints, "rewritten without it, also where it was replayed"
        fleet.client.datasets.verify(dataset_id)


@ON_SQLITE
def test_every_fifth_round_and_a_plateau_start_from_base(fleet: Fleet, campaign: str) -> None:
    starts = []
    for number in range(6):
        talk(fleet, 1000 * number, 40)
        starts.append(a_round(fleet, campaign, 0.2).spec.metadata["start_reason"])
    assert starts[0] == "nothing is live but the bare base"
    assert set(starts[1:5]) == {"campaign.start is live"}
    assert starts[5].startswith("4 rounds since the last one from base, and one in 5 starts there")
    for number in range(6, 9):
        talk(fleet, 1000 * number, 40)
        assert a_round(fleet, campaign, 0.005).spec.start is not None, "deployed, and next to nothing gained"
    assert (
        next_of(fleet, campaign).reason
        == "each of the last 3 rounds gained less than 1% (campaign.refresh_after_plateau)"
    )


@ON_SQLITE
def test_two_rejections_send_the_data_to_review_and_the_next_round_to_base(fleet: Fleet, campaign: str) -> None:
    talk(fleet, 0)
    assert a_round(fleet, campaign).state == "deployed"
    bad = talk(fleet, 1000)
    for number in (1, 2):
        assert next_of(fleet, campaign).point == "live"
        run = a_round(fleet, campaign, -0.5)
        assert (run.state, run.spec.start is None) == ("rejected", False)
        rows = experiences(fleet)
        assert {rows[each]["num_rejections"] for each in bad} == {number}
        assert {bool(rows[each]["in_review"]) for each in bad} == {number == 2}
        assert {rows[each]["state"] for each in bad} == {"collected"}
    found = next_of(fleet, campaign)
    assert (found.name, found.is_accumulated) == ("base", True)
    assert found.reason == "the last 2 rounds were rejected (campaign.refresh_after_rejections)"
    assert not fleet.client.campaigns.next_round(campaign).status.decision.opens, "the rest waits for a person"
    talk(fleet, 2000)
    run = a_round(fleet, campaign)
    assert (run.state, run.spec.start) == ("deployed", None)
    with fleet.database.read() as tx:
        taken = {member.experience_id for member in members.of_dataset(tx, run.dataset_id)}
    assert taken.isdisjoint(bad)
    assert next_of(fleet, campaign).point == "live"


@ON_SQLITE
def test_a_failed_or_cancelled_refresh_is_still_to_come(fleet: Fleet, campaign: str) -> None:
    talk(fleet, 0)
    a_round(fleet, campaign)
    talk(fleet, 1000)
    for state in (RunState.FAILED, RunState.CANCELLED):
        run = open_next(fleet, campaign, refresh_every=1)
        with fleet.database.write() as tx:
            end_task(tx, run)
            force(tx, tables.runs, run.id, state=RunState.TRAINING)
            run = queries.of_campaign(tx, campaign, 1)[0]
            lifecycle.finish(tx, run, state, actor=ACTOR, reason="as the test wants")
        assert {row["num_rejections"] for row in experiences(fleet).values()} == {0}
        assert next_of(fleet, campaign).point == "base"


@ON_SQLITE
def test_no_refresh_loses_what_was_learnt_from_files(fleet: Fleet, campaign: str) -> None:
    talk(fleet, 0)
    a_round(fleet, campaign)
    set_profile(fleet, 0.3, refresh_every=1)
    assert next_of(fleet, campaign).name == "base"
    with fleet.database.write() as tx:
        a_run(tx, RunState.DEPLOYED)  # by a person, on a dataset without experiences
    found = next_of(fleet, campaign)
    assert (found.name, FILES in found.reason) == ("support@v1", True)


@ON_SQLITE
def test_both_starts_are_trained_and_gated_against_each_other(fleet: Fleet, campaign: str) -> None:
    """With real programs: the second half is measured against the first one, if that is live by then."""
    both: dict[str, Any] = {"start": "both", "rejection_cooldown_h": 24.0, "cooldown_h": 24.0}
    talk(fleet, 0)
    assert a_real_round(fleet, campaign, 0.3, **{**both, "cooldown_h": 0.0}).spec.metadata.get("half") is None
    talk(fleet, 1000)
    first = a_real_round(fleet, campaign, 0.5, **{**both, "cooldown_h": 0.0})
    assert (first.state, first.spec.start is None, first.spec.metadata["half"]) == ("deployed", False, "1")
    second = a_real_round(fleet, campaign, 0.4, **both)
    assert (second.state, second.spec.start) == ("rejected", None), "worse than the first half, which is live"
    assert second.spec.metadata["first_half"] == first.id
    assert roles(fleet, second.dataset_id)["train", "gold"] == 0, "all that was new is learnt by then"
    counters = fleet.client.campaigns.show(campaign).counters
    assert (counters.num_rejections, counters.last_rejected_at) == (0, None), "the round went well"
    assert not fleet.client.campaigns.next_round(campaign).status.decision.opens, "a round has two halves"
    told = [(each.start, each.half) for each in fleet.client.campaigns.rounds(campaign)]
    assert told == [("base", 2), ("support@v1", 1), ("base", None)]


def a_real_round(fleet: Fleet, campaign_id: str, quality: float, **campaign: Any) -> Run:
    """Let a worker open one round, or one half, and bring it to its end."""
    before = len(runs_of(fleet, campaign_id))
    set_profile(fleet, quality, **campaign)
    fleet.work()
    found = runs_of(fleet, campaign_id)
    assert len(found) == before + 1
    return found[-1]


@ON_SQLITE
def test_second_half_waits_for_nothing_but_what_nobody_may_waive(fleet: Fleet, campaign: str) -> None:
    both: dict[str, Any] = {"start": "both", "rejection_cooldown_h": 24.0}
    talk(fleet, 0)
    a_round(fleet, campaign)
    new = talk(fleet, 1000)
    first = a_round(fleet, campaign, -0.5, **both)
    late = {**both, "cooldown_h": 24.0, "triggers": {"new_data": None, "age": None, "quality": None}}
    set_profile(fleet, 0.3, **late)
    status = fleet.client.campaigns.next_round(campaign).status
    assert status.decision.opens, status.decision.why_not
    assert status.decision.because == f"second half: {first.id} has ended (campaign.start is both)"
    fleet.client.system.estop(True, "a drill")
    assert not fleet.client.campaigns.next_round(campaign).status.decision.opens
    fleet.client.system.estop(False)
    fleet.client.campaigns.pause(campaign)
    assert not fleet.client.campaigns.next_round(campaign).status.decision.opens
    fleet.client.campaigns.resume(campaign)
    second = a_round(fleet, campaign, 0.3, **late)
    assert (second.spec.start, second.spec.metadata["first_half"]) == (None, first.id)
    with fleet.database.read() as tx:
        taken = {member.experience_id for member in members.of_dataset(tx, second.dataset_id) if member.is_new}
    assert taken == new, "what the first half gave back"
    assert not fleet.client.campaigns.next_round(campaign).status.decision.opens


@ON_SQLITE
def test_named_version_is_the_start_until_it_is_revoked(fleet: Fleet, campaign: str) -> None:
    for number in range(2):
        talk(fleet, 1000 * number)
        a_round(fleet, campaign)
    talk(fleet, 2000)
    set_profile(fleet, 0.7, start="v1")
    status = round_status(fleet.database, fleet.client.workspace, fleet.client.campaigns.show(campaign))
    assert status.decision.opens
    fleet.client.adapters.revoke(f"{PROFILE}@v1", reason="a drill")
    with pytest.raises(Refused, match="cannot start from support@v1: it is revoked"):
        open_round(fleet.database, fleet.client.workspace, status, actor="wk-late")
    assert {row["state"] for row in experiences(fleet).values()} == {"collected", "consumed"}, "nothing stays reserved"
    run = a_round(fleet, campaign, start="v1")
    assert (run.spec.metadata["start_point"], run.state) == ("support@v2", "deployed")
    assert "campaign.start is support@v1, which is revoked" in run.spec.metadata["start_reason"]
    talk(fleet, 3000)
    run = a_round(fleet, campaign, start="v2")
    [two] = [each for each in fleet.client.adapters.list(PROFILE) if each.version == 2]
    assert run.spec.start is not None
    assert run.spec.start.id == two.id


@ON_SQLITE
def test_round_is_refused_if_what_is_live_moves_while_it_is_assembled(fleet: Fleet, campaign: str) -> None:
    talk(fleet, 0)
    a_round(fleet, campaign)
    talk(fleet, 1000)
    status = round_status(fleet.database, fleet.client.workspace, fleet.client.campaigns.show(campaign))
    with fleet.database.write() as tx:
        other = an_adapter(tx)
        live = deployments.live_digest(tx, PROFILE)
        deployments.flip(tx, other, baseline=live, targets=[], actor=ACTOR, reason="a person's own")
    with pytest.raises(Refused, match="opens no round from support@v1 any more; look again"):
        open_round(fleet.database, fleet.client.workspace, status, actor="wk-late")
    assert open_next(fleet, campaign).spec.metadata["start_point"] == "support@v2"


@ON_SQLITE
def test_auto_learns_pairs_where_corrections_are_enough_and_then_what_waits(fleet: Fleet, campaign: str) -> None:
    talk(fleet, 0)
    assert a_round(fleet, campaign).spec.method == "sft"
    talk(fleet, 1000, 40, corrected=True)
    talk(fleet, 2000, 40)
    pairs = a_round(fleet, campaign)
    assert pairs.spec.method == "orpo"
    assert {role for _, role in roles(fleet, pairs.dataset_id)} == {"corrected"}
    talk(fleet, 3000, 40, corrected=True)
    after = a_round(fleet, campaign)
    assert after.spec.method == "sft"
    assert "the last round learnt pairs, and" in after.spec.metadata["method_reason"]
    assert roles(fleet, after.dataset_id)["train", "gold"] >= 10


@ON_SQLITE
def test_rounds_and_show_tell_start_and_reason(fleet: Fleet, campaign: str) -> None:
    for number in range(2):
        talk(fleet, 1000 * number)
        a_round(fleet, campaign)
    newest, oldest = json.loads(cli("campaign", "rounds", "helpdesk", "--json", cwd=fleet.root).out)
    assert (oldest["start"], oldest["start_reason"]) == ("base", "nothing is live but the bare base")
    assert (newest["start"], newest["start_reason"]) == ("support@v1", "campaign.start is live")
    assert newest["method"] == "sft"
    assert set(newest["learnt_from"]) == {"gold", "replay"}
    page = cli("campaign", "rounds", "helpdesk", cwd=fleet.root).out
    words = ["v1", "campaign.start is live", "gold,", "replay (sft)", "deployed", "new_data: ", "heldout_loss"]
    assert [word for word in words if word not in page] == []
    shown = cli("campaign", "show", "helpdesk", cwd=fleet.root).out
    assert "support@v2: campaign.start is live" in shown
    told = json.loads(cli("campaign", "show", "helpdesk", "--json", cwd=fleet.root).out)["next_round"]
    assert (told["start"]["name"], told["data"]["kind"]) == ("support@v2", "sft")
