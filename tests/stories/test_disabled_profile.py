"""Who disables or removes a profile has stopped what waits, too: it is not trained, and nothing of it goes live."""

from __future__ import annotations

import pytest

from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, cli, wait_for


def disable(fleet: Fleet, how: str) -> str:
    """What people are told then."""
    if how == "removed":
        (fleet.root / "profiles" / f"{PROFILE}.yaml").unlink()
        return f"profile {PROFILE} is gone"
    a_profile(fleet.root, enabled=False, disabled_reason="it insults people")
    return f"profile {PROFILE} is disabled: it insults people"


@pytest.mark.parametrize("how", ["disabled", "removed"])
def test_queued_run_of_a_profile_that_was_disabled_does_not_train(make_fleet: MakeFleet, how: str) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    why = disable(fleet, how)
    fleet.work()
    run = fleet.client.runs.get(run_id)
    assert run.state == "paused"
    assert why in run.reason
    assert fleet.adapter_folders() == []
    [item] = fleet.client.system.inbox()
    assert (item.id, item.kind) == (run_id, "paused run")
    fleet.client.runs.resume(run_id)
    fleet.work()
    assert fleet.state(run_id) == "paused", "still disabled"
    a_profile(fleet.root)
    fleet.client.runs.resume(run_id)
    fleet.work()
    assert fleet.state(run_id) == "deployed"


@pytest.mark.parametrize("how", ["disabled", "removed"])
def test_trained_run_of_a_profile_that_was_disabled_does_not_go_live(make_fleet: MakeFleet, how: str) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    why = disable(fleet, how)
    fleet.work()
    run = fleet.client.runs.get(run_id)
    assert (run.state, fleet.served()) == ("held", None)
    assert why in run.reason
    fleet.client.adapters.approve(f"{PROFILE}@v1")
    fleet.work()
    assert (fleet.state(run_id), fleet.served()) == ("held", None), "an approval is no permission"
    a_profile(fleet.root)
    fleet.client.adapters.approve(f"{PROFILE}@v1")
    fleet.work()
    assert fleet.state(run_id) == "deployed"


def test_training_that_is_interrupted_while_its_profile_is_disabled_keeps_its_checkpoint(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(options={"steps": 40, "step_s": 0.03}, profile={"checkpoints": {"every_steps": 2}})
    run_id = fleet.submit()
    worker = fleet.start()
    fleet.wait_for_step(run_id, 5)
    disable(fleet, "disabled")
    worker.terminate()
    worker.wait()
    fleet.work()
    assert fleet.state(run_id) == "paused"
    a_profile(fleet.root, options={"steps": 40, "step_s": 0.03})
    fleet.client.runs.resume(run_id)
    fleet.work()
    assert fleet.state(run_id) == "deployed"
    assert fleet.spec(run_id, fleet.attempts(run_id)[-1])["resume"]["step"] >= 4


def test_no_override_enables_a_disabled_profile(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    disable(fleet, "disabled")
    data = fleet.root / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    refused = cli("run", "submit", PROFILE, data, "--set", "enabled=true", cwd=fleet.root)
    assert refused.code == 1, refused.err
    assert "enabled: belongs in the profile's own file" in refused.err
    said = {"TUNESMITH__ENABLED": "true"}
    assert "belongs in the profile's own file" in cli("run", "submit", PROFILE, data, cwd=fleet.root, env=said).err
    assert fleet.client.runs.list() == []


def test_roll_back_goes_on_for_a_disabled_profile(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.submit()
    fleet.work()
    assert fleet.served() is not None
    disable(fleet, "disabled")
    fleet.client.adapters.rollback(PROFILE)
    fleet.start()
    wait_for(lambda: fleet.served() is None, 15, "for the roll-back to reach the target")
