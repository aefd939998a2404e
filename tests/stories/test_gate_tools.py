"""Tools around the gate: a policy tried on past runs, any version measured, a held run that waits for its approver."""

from __future__ import annotations

import pytest

from support.fleet import MakeFleet
from support.workspaces import PROFILE, cli
from tunesmith.core.errors import ConfigError, Refused, UsageError

V1, V2 = f"{PROFILE}@v1", f"{PROFILE}@v2"


def test_policy_is_tried_on_past_runs_and_changes_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    good = fleet.submit("trainer.options.quality=0.5")
    fleet.work()
    waiting = fleet.submit(first=100)
    before = fleet.rows()
    policy = fleet.root / "strict.yaml"
    policy.write_text("gate:\n  min_gain: 5.0\n")
    shown = cli("gate", "replay", PROFILE, "--policy", policy, cwd=fleet.root)
    assert shown.code == 0, shown.err
    words = " ".join(shown.out.split())
    assert "1 run replayed, 1 with another verdict, 1 cannot be replayed; nothing was changed" in words
    found = cli("gate", "replay", PROFILE, "--set", "gate.min_gain=5", "--json", cwd=fleet.root).json
    assert found["totals"] == {"replayed": 1, "other": 1, "not_replayable": 1, "promote -> reject": 1}
    newest, oldest = found["runs"]
    assert (newest["run_id"], newest["problem"]) == (waiting, "it has no report: the run is queued")
    assert (oldest["run_id"], oldest["version"], oldest["then"], oldest["now"]) == (good, V1, "promote", "reject")
    assert "needs ≥ 5 (then ≥ 0.01)" in oldest["changed"][0]
    assert fleet.client.gate.replay(PROFILE).totals["other"] == 0
    assert fleet.rows() == before
    with pytest.raises(UsageError, match="the gate only"):
        fleet.client.gate.replay(PROFILE, overrides=["recipe.lr=1"])
    policy.write_text("gate: {min_gian: 1}\n")
    with pytest.raises(ConfigError, match="min_gain"):
        fleet.client.gate.replay(PROFILE, policy)
    with pytest.raises(ConfigError, match="found: recipe"):
        fleet.client.gate.replay(PROFILE, {"gate": {}, "recipe": {}})


def test_any_version_is_measured_against_what_is_live_and_nothing_goes_live_by_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.submit("trainer.options.quality=0.3")
    fleet.submit("trainer.options.quality=0.6", first=100)
    fleet.work()
    asked = cli("adapter", "evaluate", V1, cwd=fleet.root)
    assert asked.code == 0, asked.err
    fleet.work()
    shown = fleet.client.runs.show(asked.last_line)
    assert shown.run.state == "completed"
    assert shown.run.reason.startswith("reject: worse: heldout_loss")
    assert shown.evaluation is not None
    assert shown.evaluation.decision == "reject"
    assert (fleet.client.adapters.show(V1).state, fleet.client.adapters.show(V2).state) == ("superseded", "live")
    with pytest.raises(Refused, match="is live already"):
        fleet.client.adapters.evaluate(V2)
    fleet.client.adapters.rollback(PROFILE, reason="to measure the newer one")
    better = fleet.client.adapters.evaluate(V2).id
    fleet.work()
    assert fleet.client.runs.get(better).reason.startswith("promote: better: heldout_loss")
    live = fleet.client.adapters.live(PROFILE)
    assert live is not None
    assert live.name == V1
