"""A live version that a later evaluation shows to be worse than what it had replaced is revoked, with the reason."""

from __future__ import annotations

from support.fleet import MakeFleet
from support.workspaces import PROFILE

V1, V2 = f"{PROFILE}@v1", f"{PROFILE}@v2"


def test_version_shown_worse_than_what_it_replaced_is_revoked_and_its_data_is_free(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.submit("trainer.options.quality=0.5")
    fleet.work()
    second = fleet.submit("trainer.options.quality=0.2", "deploy.when=never", first=100)
    learnt = fleet.an_experience(fleet.client.runs.get(second).dataset_id)
    fleet.work()
    fleet.client.adapters.deploy(V2, force=True, reason="somebody is sure of it")
    fleet.work()
    assert fleet.client.adapters.show(V2).state == "live"
    assert fleet.client.adapters.show(V1).state == "superseded", "forcing shows nothing about what was there before"
    again = fleet.client.adapters.deploy(V1).id
    fleet.work()
    assert fleet.state(again) == "deployed", fleet.client.runs.get(again).reason
    assert fleet.client.adapters.show(V1).state == "live"
    worse = fleet.client.adapters.show(V2)
    assert worse.state == "revoked"
    told = worse.events[-1].reason
    assert f"shows it worse than {V1}, which it had replaced; {V1} is better: heldout_loss" in told
    assert fleet.experience(learnt).state == "collected"
    assert [span.version for span in fleet.client.adapters.history(PROFILE)] == [f"{PROFILE}@base", V1, V2, V1]
    assert fleet.client.adapters.rollback(PROFILE) is None, "there is no way back to what is revoked"


def test_evaluation_that_finds_what_is_live_better_changes_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    for number, quality in enumerate((0.2, 0.5)):
        fleet.submit(f"trainer.options.quality={quality}", first=100 * number)
        fleet.work()
    again = fleet.client.adapters.deploy(V1).id
    fleet.work()
    assert fleet.state(again) == "rejected"
    assert (fleet.client.adapters.show(V1).state, fleet.client.adapters.show(V2).state) == ("superseded", "live")
