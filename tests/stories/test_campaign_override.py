"""An override travels: from the campaign, the project file, the environment or --set to the trainer's spec."""

from __future__ import annotations

from typing import Any

import yaml

from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE, write_settings
from tunesmith.client import Client
from tunesmith.profiles.resolve import ExplainedKey


def explained(client: Client, key: str, *overrides: str) -> ExplainedKey:
    """One row of `config explain`."""
    [row] = client.profiles.explain(PROFILE, key, overrides)
    return row


def trained_with(fleet: Fleet, run_id: str) -> dict[str, Any]:
    """The run spec that the trainer really got, from the file it was started with."""
    [attempt] = fleet.attempts(run_id)
    run: dict[str, Any] = fleet.spec(run_id, attempt)["run"]
    return run


@ON_SQLITE
def test_campaign_override_reaches_the_trainer_and_is_named_as_origin(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, profile={"recipe": {"lr": 1e-4, "epochs": 2.0}})
    plain = fleet.submit("deploy.when=never")
    campaign = fleet.client.campaigns.create(PROFILE, overrides=["recipe.lr=3e-4", "trainer.options.steps=7"])
    row = explained(fleet.client, "recipe.lr")
    assert (row.value, row.origin.layer) == (3e-4, "campaign")
    assert explained(fleet.client, "recipe.epochs").origin.layer == "profile"
    assert explained(fleet.client, "recipe.max_grad_norm").origin.layer == "default"
    run_id = fleet.submit("deploy.when=never")
    fleet.work()

    before, after = trained_with(fleet, plain), trained_with(fleet, run_id)
    assert (before["recipe"]["lr"], after["recipe"]["lr"]) == (1e-4, 3e-4)
    assert (before["campaign_id"], after["campaign_id"]) == (None, campaign.id)
    assert after["trainer_options"]["steps"] == 7
    assert fleet.steps(run_id, fleet.attempts(run_id)[0]) == list(range(1, 8)), "the trainer did not follow it"
    assert "campaign" in after["origins"]["recipe.lr"]
    assert before["fingerprints"]["config"] != after["fingerprints"]["config"]
    assert fleet.client.runs.get(run_id).campaign_id == campaign.id
    first_metrics = next(point for point in fleet.client.runs.metrics(run_id) if point["type"] == "metrics")
    assert first_metrics["lr"] == 3e-4, "the trainer did not use it"


def test_each_layer_wins_over_the_one_before(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"recipe": {"lr": 1e-4}, "deploy": {"when": "never"}})
    fleet.client.campaigns.create(PROFILE, overrides=["recipe.lr=2e-4"])
    by_campaign = fleet.submit()
    settings = {"recipe": {"lr": 3e-4}}
    write_settings(fleet.root, settings)
    assert yaml.safe_load((fleet.root / "tunesmith.yaml").read_text())["recipe"] == settings["recipe"]
    with Client(fleet.root) as client:
        assert explained(client, "recipe.lr").origin.layer == "project"
        by_project = client.runs.submit(PROFILE, fleet.root / "data-0-60.jsonl").id
    with Client(fleet.root, environ={"TUNESMITH__RECIPE__LR": "4e-4"}) as client:
        assert explained(client, "recipe.lr").origin.layer == "environment"
        row = explained(client, "recipe.lr", "recipe.lr=5e-4")
        assert (row.value, row.origin.layer) == (5e-4, "override")
        by_environment = client.runs.submit(PROFILE, fleet.root / "data-0-60.jsonl").id
        by_hand = client.runs.submit(PROFILE, fleet.root / "data-0-60.jsonl", overrides=["recipe.lr=5e-4"]).id
    fleet.work()
    ids = (by_campaign, by_project, by_environment, by_hand)
    assert [trained_with(fleet, run_id)["recipe"]["lr"] for run_id in ids] == [2e-4, 3e-4, 4e-4, 5e-4]
    words = ("campaign", "tunesmith.yaml", "TUNESMITH__RECIPE__LR", "--set")
    for run_id, word in zip(ids, words, strict=True):
        assert word in trained_with(fleet, run_id)["origins"]["recipe.lr"]


def test_archived_campaign_has_no_say_any_more(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"recipe": {"lr": 1e-4}, "deploy": {"when": "never"}})
    campaign = fleet.client.campaigns.create(PROFILE, overrides=["recipe.lr=2e-4"])
    during = fleet.submit()
    fleet.client.campaigns.archive(campaign.id)
    afterwards = fleet.submit()
    fleet.work()
    assert trained_with(fleet, during)["recipe"]["lr"] == 2e-4, "a queued run keeps the spec it was queued with"
    assert trained_with(fleet, afterwards)["recipe"]["lr"] == 1e-4
    assert trained_with(fleet, afterwards)["campaign_id"] is None


def test_campaign_counts_how_its_runs_end(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    campaign = fleet.client.campaigns.create(PROFILE)
    failed = fleet.submit("trainer.options.script=raise")
    fleet.work()
    assert fleet.state(failed) == "failed"
    assert len(fleet.client.campaigns.show(campaign.id).counters.failures) == 1
    deployed = fleet.submit()
    fleet.work()
    assert fleet.state(deployed) == "deployed"
    counters = fleet.client.campaigns.show(campaign.id).counters
    assert (len(counters.failures), counters.last_success_at is not None) == (0, True)
    rejected = fleet.submit("trainer.options.quality=0.1")
    fleet.work()
    assert fleet.state(rejected) == "rejected"
    counters = fleet.client.campaigns.show(campaign.id).counters
    assert (len(counters.failures), counters.num_rejections) == (0, 1)
