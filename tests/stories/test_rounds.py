"""A worker that is left alone: campaigns open their rounds by themselves, once each, and say why they do not."""

from __future__ import annotations

from typing import Any

import pytest

from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, wait_for
from tunesmith.core.errors import Refused
from tunesmith.runs.queries import runs as queries
from tunesmith.runs.queries.runs import Run
from tunesmith.store import events

EAGER: dict[str, Any] = {
    "window": "00:00-24:00",
    "cooldown_h": 0.0,
    "rejection_cooldown_h": 0.0,
    "triggers": {"new_data": {"count": 40}},
}
MIX = {"experience": {"mix": {"min_new": 10, "min_eval_examples": 0}}}
SETTINGS = {"worker": {"triggers_s": 0.2}}


def set_profile(fleet: Fleet, quality: float, **sections: Any) -> None:
    a_profile(fleet.root, options={"quality": quality, "steps": 2}, **{"campaign": EAGER, **MIX, **sections})


def talk(fleet: Fleet, first: int, num: int = 60) -> None:
    """People use the model: so many new conversations."""
    for number in range(first, first + num):
        question = {"role": "user", "content": f"What is {number} plus {number}?"}
        answer = {"role": "assistant", "content": f"{number} plus {number} is {2 * number}, as you can easily check."}
        fleet.client.experiences.add(PROFILE, [question, answer])


def automatic(fleet: Fleet) -> list[Run]:
    """Oldest first."""
    with fleet.database.read() as tx:
        return [run for run in reversed(queries.listing(tx, limit=1000)) if run.automatic]


def opened(fleet: Fleet, campaign_id: str) -> list[events.RecordedEvent]:
    with fleet.database.read() as tx:
        return [event for event in events.of_entity(tx, "campaign", campaign_id) if event.action == "round_opened"]


@pytest.fixture
def fleet(make_fleet: MakeFleet, store: str | None) -> Fleet:
    made = make_fleet(store=store, settings=SETTINGS)
    set_profile(made, 0.3)
    return made


@ON_SQLITE
def test_worker_left_alone_opens_three_rounds_by_itself(fleet: Fleet) -> None:
    campaign = fleet.client.campaigns.create(PROFILE)
    fleet.start()
    for number, quality in enumerate((0.3, 0.5, 0.7), start=1):
        set_profile(fleet, quality)
        talk(fleet, 1000 * number)

        def deployed(num: int = number) -> bool:
            runs = automatic(fleet)
            assert sum(run.finished_at is None for run in runs) <= 1, "stacked"
            return len(runs) == num and runs[-1].state == "deployed"

        wait_for(deployed, 60, f"for round {number}: {[(r.state, r.reason) for r in automatic(fleet)]}")
    runs = automatic(fleet)
    assert [run.state for run in runs] == ["deployed"] * 3
    assert {run.campaign_id for run in runs} == {campaign.id}
    told = opened(fleet, campaign.id)
    assert [event.detail["run"] for event in told] == [run.id for run in runs]
    for event in told:
        assert event.reason.startswith("new_data: ")
        names = [condition["name"] for condition in event.detail["conditions"]]
        assert {"window", "breaker", "unfinished round", "minimum new", "new_data"} <= set(names)
    assert [version.version for version in fleet.client.adapters.list(PROFILE) if version.state == "live"] == [3]
    assert fleet.client.campaigns.show(campaign.id).counters.last_success_at is not None


@ON_SQLITE
def test_without_an_active_campaign_nothing_is_opened(fleet: Fleet) -> None:
    talk(fleet, 0)
    fleet.work()
    assert automatic(fleet) == []
    campaign = fleet.client.campaigns.create(PROFILE, overrides=["recipe.lr=3e-4"])
    fleet.client.campaigns.pause(campaign.id)
    fleet.work()
    assert automatic(fleet) == []
    row = next(iter(fleet.client.profiles.explain(PROFILE, "recipe.lr")))
    assert (row.value, row.origin.layer) == (3e-4, "campaign"), "a paused campaign keeps its overrides"
    fleet.client.campaigns.resume(campaign.id)
    fleet.work()
    [run] = automatic(fleet)
    assert (run.state, run.spec.recipe.lr) == ("deployed", 3e-4)


@ON_SQLITE
def test_rejected_data_waits_for_the_cooldown_of_rejections(fleet: Fleet) -> None:
    set_profile(fleet, -0.5, campaign={**EAGER, "rejection_cooldown_h": 24.0})
    campaign = fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0)
    fleet.work()
    [run] = automatic(fleet)
    assert run.state == "rejected"
    [line] = fleet.client.campaigns.next_round(campaign.id).status.decision.why_not
    assert line.startswith("cooldown after a rejection: ")
    fleet.work()
    assert len(automatic(fleet)) == 1
    made = fleet.client.campaigns.trigger(campaign.id)
    assert [run.id for run in automatic(fleet)][1:] == [made.run_id]


@ON_SQLITE
def test_person_asks_for_a_round_and_is_told_what_nobody_may_waive(fleet: Fleet) -> None:
    set_profile(fleet, 0.3, campaign={"window": "03:00-03:01", "triggers": {"new_data": None}})
    campaign = fleet.client.campaigns.create(PROFILE, name="helpdesk")
    with pytest.raises(Refused, match=r"campaign helpdesk opens no round now: minimum new: 0 new examples"):
        fleet.client.campaigns.trigger("helpdesk")
    talk(fleet, 0)
    fleet.client.system.estop(True, "a drill")
    with pytest.raises(Refused, match=r"emergency stop: on; wanted: off"):
        fleet.client.campaigns.trigger("helpdesk")
    fleet.client.system.estop(False)
    first = fleet.client.campaigns.trigger("helpdesk")
    talk(fleet, 1000)
    with pytest.raises(Refused, match=rf"unfinished round: {first.run_id} is queued; wanted: none"):
        fleet.client.campaigns.trigger("helpdesk")
    fleet.work()
    assert fleet.state(first.run_id) == "deployed"
    [event] = opened(fleet, campaign.id)
    assert event.reason.endswith("request: asked for by user:test (a person asks)")
    fleet.client.campaigns.pause("helpdesk")
    with pytest.raises(Refused, match="campaign: paused; wanted: active"):
        fleet.client.campaigns.trigger("helpdesk")
