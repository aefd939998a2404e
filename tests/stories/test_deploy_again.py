"""`adapter deploy`: any version can go live again, judged against what is live now, or forced with a reason."""

from __future__ import annotations

import pytest

from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, cli, states_of
from tunesmith.core.errors import Refused, TunesmithError, UsageError

V1, V2 = f"{PROFILE}@v1", f"{PROFILE}@v2"


def two_versions(fleet: Fleet) -> tuple[str, str]:
    """v1 is good and superseded, v2 is better and live; the runs that made them."""
    made = (fleet.submit("trainer.options.quality=0.3"), fleet.submit("trainer.options.quality=0.6", first=100))
    fleet.work()
    assert [fleet.state(run_id) for run_id in made] == ["deployed", "deployed"]
    return made


def live(fleet: Fleet) -> str | None:
    found = fleet.client.adapters.live(PROFILE)
    assert fleet.served() == (None if found is None else found.digest)
    return None if found is None else found.name


@ON_SQLITE
def test_version_goes_live_again_after_a_roll_back_to_the_base(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store)
    first, second = two_versions(fleet)
    fleet.client.adapters.rollback(PROFILE, reason="people complain")
    fleet.client.adapters.rollback(PROFILE, reason="still")
    fleet.work()
    assert live(fleet) is None
    assert [fleet.state(run_id) for run_id in (first, second)] == ["rolled_back", "rolled_back"]
    again = cli("adapter", "deploy", V2, "--reason", "it was not the model", cwd=fleet.root)
    assert again.code == 0, again.err
    fleet.work()
    assert live(fleet) == V2
    assert states_of(fleet.client, again.last_line) == [
        "queued", "evaluating", "deploying", "watching", "deployed"
    ]  # fmt: skip
    assert "it was not the model" in cli("run", "show", again.last_line, cwd=fleet.root).out
    assert fleet.client.runs.get(again.last_line).adapter == V2
    assert len(fleet.client.adapters.list()) == 2, "nothing new was trained"
    fleet.client.adapters.rollback(PROFILE)
    assert fleet.state(again.last_line) == "rolled_back"


def test_version_that_may_never_be_deployed_by_itself_is_deployed_by_a_person(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"deploy": {"when": "never"}})
    made_by = fleet.submit()
    fleet.work()
    assert (fleet.state(made_by), live(fleet)) == ("completed", None)
    run_id = fleet.client.adapters.deploy(V1).id
    fleet.work()
    assert (fleet.state(run_id), fleet.state(made_by), live(fleet)) == ("deployed", "completed", V1)


def test_gate_refuses_what_is_worse_than_what_is_live_and_force_overrides_it_with_a_reason(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet()
    two_versions(fleet)
    gated = fleet.client.adapters.deploy(V1).id
    fleet.work()
    assert (fleet.state(gated), live(fleet)) == ("rejected", V2)
    assert fleet.client.adapters.show(V1).state == "superseded", "it was live once, and nobody took that back"
    with pytest.raises(UsageError, match="needs a reason"):
        fleet.client.adapters.deploy(V1, force=True, reason="  ")
    forced = cli("adapter", "deploy", V1, "--force", "--reason", "v2 is too slow", cwd=fleet.root)
    assert forced.code == 0, forced.err
    fleet.work()
    assert (fleet.state(forced.last_line), live(fleet)) == ("deployed", V1)
    told = [event for event in fleet.client.adapters.show(V1).events if "v2 is too slow" in event.reason]
    assert {event.action for event in told} == {"forced", "moved"}
    assert fleet.client.adapters.show(V2).state == "superseded"


def test_rejected_version_is_called_rejected_and_can_be_forced(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit("trainer.options.quality=-0.5")
    fleet.work()
    shown = fleet.client.adapters.show(V1)
    assert (fleet.state(run_id), shown.state, shown.run_state) == ("rejected", "rejected", "rejected")
    assert "rejected" in cli("adapter", "list", cwd=fleet.root).out
    fleet.client.adapters.deploy(V1, force=True, reason="to look at it")
    fleet.work()
    assert live(fleet) == V1


def test_held_version_without_numbers_is_not_approved_but_may_be_forced(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"eval_script": "error"})
    run_id = fleet.submit()
    fleet.work()
    assert fleet.state(run_id) == "held"
    refused = cli("adapter", "approve", V1, cwd=fleet.root)
    assert (refused.code, live(fleet)) == (1, None)
    assert "no evidence" in refused.err
    with pytest.raises(Refused, match="no evidence"):
        fleet.client.adapters.deploy(V1)
    [item] = fleet.client.system.inbox()
    assert f"adapter deploy {V1} --force" in item.what_to_do
    watched = " ".join(cli("run", "watch", run_id, cwd=fleet.root).out.split())
    assert f"next: without evidence it cannot be approved: `tunesmith adapter evaluate {V1}`" in watched
    assert fleet.client.adapters.deploy(V1, force=True, reason="I read fifty answers").id == run_id
    fleet.work()
    assert (fleet.state(run_id), live(fleet)) == ("deployed", V1)


def test_what_cannot_go_live_is_refused_with_what_to_do(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    two_versions(fleet)
    with pytest.raises(Refused, match="is live already"):
        fleet.client.adapters.deploy(V2)
    waiting = fleet.client.adapters.deploy(V1).id
    with pytest.raises(Refused, match=f"run {waiting} is about {V1} and is evaluating"):
        fleet.client.adapters.deploy(V1, force=True, reason="now")
    fleet.client.runs.cancel(waiting)
    assert fleet.state(waiting) == "cancelled"
    a_profile(fleet.root, enabled=False, disabled_reason="we move")
    with pytest.raises(TunesmithError, match="is disabled: we move"):
        fleet.client.adapters.deploy(V1, force=True, reason="now")
    a_profile(fleet.root)
    fleet.client.adapters.revoke(V1, "leaks")
    with pytest.raises(Refused, match="revoked, and that is for ever"):
        fleet.client.adapters.deploy(V1, force=True, reason="now")


def test_version_that_is_revoked_while_its_deployment_waits_is_rejected(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    assert fleet.state(run_id) == "deploying"
    fleet.client.adapters.revoke(V1, "leaks")
    fleet.work()
    assert (fleet.state(run_id), live(fleet)) == ("rejected", None)
