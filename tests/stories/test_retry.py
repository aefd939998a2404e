"""`run retry`: the old run again, with what it was told and what the person changes now, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.fleet import MakeFleet
from support.workspaces import PROFILE, a_jsonl, a_profile, a_workspace, cli, submit, work_here
from tunesmith.core.errors import Refused

TOLD = (
    "deploy.when=never",
    "gate.min_cases=12",
    "gate.on_tie=hold",
    "gate.floors.heldout_loss=3.5",
    "evaluation.max_cases=77",
    "evaluation.temperature=0.9",
    "validation.every_steps=3",
    "checkpoints.every_steps=null",
    "checkpoints.every_minutes=5",
    "watch.for_s=1.5",
    "watch.max_failures=7",
    "shadow.enabled=true",
    "budgets.tokens=1234567",
    "recipe.lr=null",
    "recipe.epochs=2",
    "hardware.memory_gb=3",
    "base.context=2048",
    'targets=[{"name": "there", "kind": "directory", "options": {"path": "served"}}]',
    "trainer.options.quality=0.25",
)
NOT_TOLD = frozenset({"run_id", "origins", "fingerprints"})
"""What two runs never share, or what follows from the rest."""


def spec_of(client: Any, run_id: str) -> dict[str, Any]:
    spec: dict[str, Any] = client.runs.show(run_id).spec
    return {key: value for key, value in spec.items() if key not in NOT_TOLD}


def test_retry_is_told_everything_the_old_run_was_told(tmp_path: Path) -> None:
    profile = {"recipe": {"lr": 1e-3}, "gate": {"floors": {"heldout_loss": 9.0}}}
    with a_workspace(tmp_path, profile=profile) as client:
        old = submit(client, overrides=TOLD, priority="high", start="base", metadata={"why": "a test"})
        client.runs.cancel(old)
        once = client.runs.retry(old).id
        assert spec_of(client, once) == spec_of(client, old)
        client.runs.cancel(once)
        twice = client.runs.retry(once).id  # a retry remembers who said what, so that it can be tried again too
        assert spec_of(client, twice) == spec_of(client, old)
        new = client.runs.get(twice)
        assert (new.priority, new.parent_id) == ("high", once)


def test_retry_keeps_what_came_over_the_api_from_the_environment_and_from_a_campaign(tmp_path: Path) -> None:
    with a_workspace(tmp_path, environ={"TUNESMITH__DEPLOY__WHEN": "never"}) as client:
        campaign = client.campaigns.create(PROFILE, overrides={"watch.max_failures": 9})
        old = submit(client, overrides={"gate.min_cases": 11, "recipe": {"lr": None}})
        client.runs.cancel(old)
        client.campaigns.pause(campaign.id)
        root = client.workspace.root
    answer = cli("run", "retry", old, cwd=root)  # another shell, without the variable
    assert answer.code == 0, answer.err
    with a_client(root) as client:
        spec = client.runs.show(answer.last_line).spec
    assert (spec["deploy"]["when"], spec["gate"]["min_cases"], spec["watch"]["max_failures"]) == ("never", 11, 9)


def a_client(root: Path) -> Any:
    from tunesmith.client import Client

    return Client(root, actor="user:test", environ={})


def test_retry_takes_what_the_person_changes_and_what_was_mended_in_the_profile(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile={"recipe": {"epochs": 2, "seed": 5}}) as client:
        old = submit(client, overrides=("deploy.when=never", "recipe.epochs=4"))
        client.runs.cancel(old)
        a_profile(client.workspace.root, recipe={"epochs": 9, "seed": 6})
        new = client.runs.retry(old, overrides=("gate.min_cases=13",), priority="low").id
        spec = client.runs.show(new).spec
        assert spec["recipe"]["epochs"] == 4, "the old command line is stronger than the file"
        assert spec["recipe"]["seed"] == 6, "the file was changed by a person"
        assert (spec["deploy"]["when"], spec["gate"]["min_cases"]) == ("never", 13)
        assert client.runs.get(new).priority == "low"


def test_retry_of_a_run_that_may_never_deploy_does_not_deploy(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    old = fleet.submit("deploy.when=never")
    fleet.work()
    new = cli("run", "retry", old, cwd=fleet.root).last_line
    fleet.work()
    assert [fleet.state(old), fleet.state(new)] == ["completed", "completed"]
    assert fleet.served() is None


def test_retry_starts_where_the_old_run_started(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        first = submit(client, overrides=("trainer.options.quality=0.2",))
        work_here(client)
        old = submit(client, overrides=("trainer.options.quality=0.4",))
        client.runs.cancel(old)
        data = a_jsonl(tmp_path / "more.jsonl", first=500)
        submit(client, data=data, overrides=("trainer.options.quality=0.9",))
        work_here(client)
        assert client.adapters.live(PROFILE).name == f"{PROFILE}@v2"
        began = client.adapters.show(f"{PROFILE}@v1").id
        assert client.runs.show(client.runs.retry(old).id).spec["start"]["id"] == began
        assert client.runs.show(client.runs.retry(first).id).spec["start"] is None
        chosen = client.runs.retry(old, start="live").id
        assert client.runs.show(chosen).spec["start"]["id"] == client.adapters.live(PROFILE).id
        client.adapters.revoke(f"{PROFILE}@v1", "leaks")
        with pytest.raises(Refused, match="revoked since; choose where to start"):
            client.runs.retry(old)


def test_retry_of_a_dry_run_is_a_dry_run(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        dataset, _ = client.datasets.prepare(PROFILE, [a_jsonl(tmp_path / "data.jsonl")])
        old = client.runs.submit(PROFILE, dataset.id, dry_run=True, overrides=("gate.min_cases=11",)).id
        client.runs.cancel(old)
        new = client.runs.retry(old).id
        assert spec_of(client, new) == spec_of(client, old)
        work_here(client)
        assert client.runs.get(new).state == "validated"
