"""The facts behind a campaign's decision, and what `campaign show` and `campaign rounds` make of them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, cli
from tunesmith.client import Client
from tunesmith.core.clock import utc_now
from tunesmith.core.errors import ConfigError, Refused, UsageError
from tunesmith.experience.assemble import next_choice
from tunesmith.experience.queries.new_data import live_quality, new_data
from tunesmith.triggers.base import LiveQuality, NewData

ALL_IN = {"mix": {"min_new": 1, "max_examples": 500, "min_eval_examples": 500, "max_template_share": 1.0}}
EAGER = {"window": "00:00-24:00", "cooldown_h": 0.0, "triggers": {"new_data": {"count": 40}}}
SMALL = {"mix": {"min_new": 10, "min_eval_examples": 0}}


def talk(client: Client, number: int, **about: Any) -> str:
    question = {"role": "user", "content": f"What is {number} plus one?"}
    answer = {"role": "assistant", "content": f"One more than {number} is {number + 1}."}
    return client.experiences.add(PROFILE, [question, answer], **about).id


def counted(client: Client, **wanted: Any) -> NewData:
    with client._session.database.read() as tx:
        return new_data(tx, PROFILE, trusts_base=False, **wanted)


@pytest.fixture
def fleet(make_fleet: MakeFleet, store: str | None) -> Fleet:
    return make_fleet(store=store, profile={"experience": ALL_IN})


def test_new_data_is_what_an_assembly_would_take_weighted_by_its_quality(fleet: Fleet) -> None:
    client = fleet.client
    long_ago = utc_now() - timedelta(days=40)
    for number in range(20):
        talk(client, number, captured_at=long_ago if number == 7 else None)
    client.feedback.add(talk(client, 100), "helpful")
    client.feedback.add(talk(client, 101), 0.9)
    client.feedback.add(talk(client, 102), "irrelevant", correction="One more than 102 is 103, of course.")
    for rater in ("a", "b", "c"):
        client.feedback.add(talk(client, 103), "irrelevant", rater=rater)  # poor, and nobody corrected it
    found = counted(client)
    assert found.num == 23
    assert found.weight == pytest.approx(20 * 0.5 + 1.0 + 0.9 + 1.0)
    assert found.oldest_at is not None
    assert abs(found.oldest_at - long_ago) < timedelta(seconds=1)
    assert counted(client, needs_correction=True).num == 1
    assert counted(client, task_types=("sums",)).num == 0
    report, _ = next_choice(client._session.database, client.workspace, client.profiles.check(PROFILE))
    assert report.num_reserved == found.num
    client.datasets.assemble(PROFILE)
    assert counted(client) == NewData(), "what a dataset has reserved is not new"


def test_quality_is_told_in_windows_since_the_version_went_live(fleet: Fleet) -> None:
    client = fleet.client
    since = utc_now() - timedelta(seconds=1)

    def quality(window: int = 10) -> LiveQuality:
        with client._session.database.read() as tx:
            return live_quality(tx, PROFILE, f"{PROFILE}@base", since, window=window, num_audits=2)

    assert quality() == LiveQuality()
    talk(client, 5000, captured_at=since - timedelta(days=1))  # happened before
    talk(client, 5001, served_by=f"{PROFILE}@v9")  # another version answered
    for number in range(9):
        talk(client, number)
    assert quality() == LiveQuality()
    talk(client, 9)
    assert quality() == LiveQuality(1.0, ())
    for window in range(1, 4):
        for number in range(10):
            said = talk(client, 100 * window + number)
            if number < 2 * window:
                client.feedback.add(said, "irrelevant")
    seen = quality()
    assert seen.baseline == 1.0
    assert len(seen.audits) == 2
    assert 1.0 > seen.audits[0] > seen.audits[1]


def test_show_tells_every_condition_and_rounds_tells_what_came_of_them(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"experience": SMALL, "campaign": EAGER}, settings={"worker": {"triggers_s": 0.2}})
    fleet.client.campaigns.create(PROFILE, name="helpdesk", description="answers on sums", budget={"gpu_hours": 5.0})
    shown = cli("campaign", "show", "helpdesk", cwd=fleet.root).out
    words = ["answers on sums", "Why no round is opened now", "window", "breaker", "0 new experiences", "≥ 40"]
    words += ["0 spent, and the next round may cost 4", "≤ 5 together", "no round has ended yet"]
    assert [word for word in words if word not in shown] == []
    assert "No round yet" in cli("campaign", "rounds", "helpdesk", cwd=fleet.root).out
    for number in range(60):
        talk(fleet.client, number)
    fleet.work()
    told = json.loads(cli("campaign", "show", "helpdesk", "--json", cwd=fleet.root).out)
    assert (told["name"], told["num_rounds"], told["next_round"]["opens"]) == ("helpdesk", 1, False)
    assert told["counters"]["num_rejections"] == 0, "the campaign's own fields stay where they were"
    names = [each["name"] for each in told["next_round"]["conditions"]]
    assert {"budget, GPU hours", "unfinished round", "emergency stop"} <= set(names)
    assert told["next_round"]["expected"]["gain"] > 0
    [row] = json.loads(cli("campaign", "rounds", "helpdesk", "--json", cwd=fleet.root).out)
    assert (row["state"], row["is_automatic"], row["metric"]) == ("deployed", True, "heldout_loss")
    assert row["learnt_from"]["gold"] >= 10
    assert row["before"] > row["after"], "a lower loss is better"
    assert row["gpu_hours"] > 0
    assert row["opened_by"].startswith("new_data: ")
    page = cli("campaign", "rounds", "helpdesk", cwd=fleet.root).out
    assert "heldout_loss" in page
    assert f"{PROFILE}@v1" == row["version"]


def test_budget_that_the_next_round_could_exceed_opens_none(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"experience": SMALL, "campaign": EAGER, "budgets": {"wall_s": 3600.0}})
    with pytest.raises(ConfigError, match=r"budget\.gpu_hour: unknown key; did you mean 'gpu_hours'"):
        fleet.client.campaigns.create(PROFILE, budget={"gpu_hour": 1.0})
    with pytest.raises(ConfigError, match="gpu_hour_price: is not set"):
        fleet.client.campaigns.create(PROFILE, budget={"money": 1.0})
    with pytest.raises(UsageError, match="'Help Desk' cannot name a campaign"):
        fleet.client.campaigns.create(PROFILE, name="Help Desk")
    campaign = fleet.client.campaigns.create(PROFILE, budget={"money": 2.0, "gpu_hour_price": 2.0})
    for number in range(60):
        talk(fleet.client, number)
    fleet.work()
    for number in range(100, 160):
        talk(fleet.client, number)
    fleet.work()
    assert len(fleet.client.campaigns.rounds(campaign.id)) == 1, "the second may cost 2.00, and some is spent"
    with pytest.raises(Refused, match=r"budget, money: 0\.\d+ spent, and the next round may cost 2"):
        fleet.client.campaigns.trigger(campaign.id)


def test_disabled_or_broken_profile_is_the_reason(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"campaign": EAGER})
    campaign = fleet.client.campaigns.create(PROFILE)
    a_profile(fleet.root, campaign=EAGER, enabled=False, disabled_reason="under repair")
    lines = fleet.client.campaigns.next_round(campaign.id).status.decision.why_not
    assert any(line.startswith("profile: profile support: is disabled: under repair") for line in lines), lines
    a_profile(fleet.root, campaign={"window": "soon"})
    [line, _] = fleet.client.campaigns.next_round(campaign.id).status.decision.why_not
    assert "campaign.window: 'soon' must be HH:MM-HH:MM" in line
    fleet.work()
    assert list(fleet.client.campaigns.rounds(campaign.id)) == []
