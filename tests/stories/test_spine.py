"""The spine with real worker processes: from submitted to deployed, and everything the gate may say instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE, states_of, wait_for
from tunesmith.core.files import sha256_file, verify_folder


@pytest.mark.real_programs
def test_run_is_deployed_and_the_target_serves_its_adapter(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, profile={"watch": {"for_s": 0.3}})
    run_id = fleet.submit()
    experience_id = fleet.an_experience(fleet.client.runs.get(run_id).dataset_id)
    worker = fleet.start()
    fleet.wait(run_id, "deployed")

    expected = ["queued", "training", "evaluating", "deploying", "watching", "deployed"]
    assert states_of(fleet.client, run_id) == expected
    adapter = fleet.client.adapters.live(PROFILE)
    assert adapter is not None
    assert (adapter.name, adapter.run_id) == (f"{PROFILE}@v1", run_id)
    assert fleet.served() == adapter.digest == verify_folder(adapter.path).digest
    link = fleet.root / ".tunesmith" / "live" / PROFILE / "current"
    assert link.is_symlink()
    assert link.resolve().name == adapter.name
    deployment = fleet.client.adapters.deployment(PROFILE)
    assert (deployment.wanted, deployment.targets[0]["observed"]) == (adapter.name, adapter.name)
    consumed = fleet.experience(experience_id)
    assert (consumed.state, consumed.run_id, consumed.adapter_id) == ("consumed", run_id, adapter.id)
    assert worker.poll() is None
    history_is_in_order_with_an_actor_for_every_change(fleet, run_id)


def history_is_in_order_with_an_actor_for_every_change(fleet: Fleet, run_id: str) -> None:
    events = fleet.client.runs.show(run_id).events
    moved = [event for event in events if event.new_state is not None]
    assert moved[0].actor == "user:test"
    assert {event.actor[:3] for event in moved[1:]} == {"wk-"}
    assert [event.old_state for event in moved[1:]] == [event.new_state for event in moved[:-1]]
    rows = fleet.rows()
    assert all(row["actor"] for row in rows["events"])
    assert {row["entity"] for row in rows["events"]} >= {"run", "task", "attempt", "adapter", "deployment", "dataset"}
    instants = [row["at"] for row in rows["events"]]
    assert instants == sorted(instants)
    for table, entity in (("runs", "run"), ("tasks", "task"), ("attempts", "attempt"), ("adapters", "adapter")):
        moves = [row for row in rows["events"] if row["entity"] == entity and row["new_state"] is not None]
        last = {row["entity_id"]: row["new_state"] for row in moves}
        assert last == {row["id"]: row["state"] for row in rows[table]}, table


@ON_SQLITE
def test_worse_adapter_is_rejected_and_the_live_one_stays(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store)
    good = fleet.submit("trainer.options.quality=0.6", lines=200)
    fleet.work()
    assert fleet.state(good) == "deployed"
    before = fleet.served()
    link = fleet.root / ".tunesmith" / "live" / PROFILE / "current"
    inode = link.lstat().st_ino
    worse = fleet.submit("trainer.options.quality=0.3", lines=200)
    experience_id = fleet.an_experience(fleet.client.runs.get(worse).dataset_id)
    fleet.work()
    run = fleet.client.runs.get(worse)
    assert (run.state, run.reason.split(":")[0]) == ("rejected", "worse")
    assert run.adapter == f"{PROFILE}@v2"
    assert fleet.client.adapters.show(f"{PROFILE}@v2").state == "rejected"
    assert fleet.served() == before
    assert link.lstat().st_ino == inode
    live = fleet.client.adapters.live(PROFILE)
    assert live is not None
    assert live.run_id == good
    released = fleet.experience(experience_id)
    assert (released.state, released.num_rejections) == ("collected", 1)


@pytest.fixture
def tied(make_fleet: MakeFleet) -> Fleet:
    """A fleet with one live adapter of quality 0.5, as good as whatever is trained next."""
    fleet = make_fleet(profile={"gate": {"min_cases": 10, "confidence": 0.99}})
    fleet.submit(lines=200)
    fleet.work()
    return fleet


def test_tie_that_is_held_goes_live_only_when_approved(tied: Fleet) -> None:
    before = tied.served()
    run_id = tied.submit("gate.on_tie=hold", lines=200)
    tied.work()
    assert tied.state(run_id) == "held"
    assert tied.served() == before
    [item] = tied.client.system.inbox()
    assert (item.kind, item.id) == ("held run", run_id)
    answer = tied.client.adapters.approve(f"{PROFILE}@v2")
    assert answer.state == "deploying"
    tied.work()
    assert tied.state(run_id) == "deployed"
    assert tied.served() == tied.client.adapters.show(f"{PROFILE}@v2").digest != before
    approved = [event for event in tied.client.runs.show(run_id).events if event.new_state == "deploying"]
    assert approved[0].actor == "user:test"


def test_tie_is_rejected_by_default_and_by_a_person_where_it_is_held(tied: Fleet) -> None:
    before = tied.served()
    by_default = tied.submit(lines=200)
    held = tied.submit("gate.on_tie=hold", lines=200)
    tied.work()
    run = tied.client.runs.get(by_default)
    assert run.state == "rejected"
    assert run.reason.startswith("no measurable difference")
    tied.client.adapters.reject(f"{PROFILE}@v3", "not this one")
    run = tied.client.runs.get(held)
    assert (run.state, run.reason) == ("rejected", "not this one")
    assert tied.served() == before
    assert tied.client.system.inbox() == []


def test_hold_that_nobody_decides_on_expires(tied: Fleet) -> None:
    before = tied.served()
    run_id = tied.submit("gate.on_tie=hold", "gate.hold_expires_s=0.4", lines=200)
    worker = tied.start()
    tied.wait(run_id, "rejected")
    events = [event for event in tied.client.runs.show(run_id).events if event.new_state is not None]
    assert [event.new_state for event in events][-2:] == ["held", "rejected"]
    assert events[-1].reason == "held too long without a decision"
    assert tied.served() == before
    assert worker.poll() is None


def test_held_run_approved_on_stale_evidence_is_measured_again(tied: Fleet) -> None:
    run_id = tied.submit("gate.on_tie=hold", "gate.max_age_s=0.2", lines=200)
    tied.work()
    wait_for(lambda: _age_s(tied, run_id) > 0.3, 5)
    assert tied.client.adapters.approve(f"{PROFILE}@v2").state == "evaluating"
    tied.work()
    assert tied.state(run_id) == "held"
    assert len(tied.attempts(run_id, "evaluate")) == 2


def _age_s(fleet: Fleet, run_id: str) -> float:
    evaluation = fleet.client.runs.show(run_id).evaluation
    assert evaluation is not None
    with fleet.database.read() as tx:
        return (tx.now - evaluation.created_at).total_seconds()


def test_promoted_adapter_waits_for_approval_where_the_profile_says_so(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"deploy": {"when": "approved"}})
    run_id = fleet.submit()
    fleet.work()
    assert fleet.state(run_id) == "held"
    assert fleet.served() is None
    fleet.client.adapters.approve(f"{PROFILE}@v1")
    fleet.work()
    assert fleet.state(run_id) == "deployed"
    assert fleet.served() is not None


def test_promoted_adapter_is_never_deployed_where_the_profile_says_so(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"deploy": {"when": "never"}})
    run_id = fleet.submit()
    experience_id = fleet.an_experience(fleet.client.runs.get(run_id).dataset_id)
    fleet.work()
    assert fleet.state(run_id) == "completed"
    assert fleet.served() is None
    assert fleet.client.adapters.live(PROFILE) is None
    assert fleet.experience(experience_id).state == "consumed"


def test_too_few_cases_are_held_never_promoted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"gate": {"min_cases": 50}})
    run_id = fleet.submit(lines=60)
    fleet.work()
    run = fleet.client.runs.get(run_id)
    assert run.state == "held"
    assert "gate.min_cases" in run.reason


def test_dry_run_is_validated_and_leaves_everything_as_it_was(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    live = fleet.submit()
    fleet.work()
    before, served = fleet.rows(), fleet.served()
    run_id = fleet.submit(dry_run=True)
    dataset, _ = fleet.client.datasets.show(fleet.client.runs.get(run_id).dataset_id)
    experience_id = fleet.an_experience(dataset.id)
    digests = _digests(fleet.client.workspace.data_dir / dataset.path)
    folders = fleet.adapter_folders()
    fleet.work()

    run = fleet.client.runs.get(run_id)
    assert (run.state, run.adapter) == ("validated", None)
    assert states_of(fleet.client, run_id) == ["queued", "training", "validated"]
    after = fleet.rows()
    for table in ("adapters", "deployments", "observations", "evaluations", "checkpoints", "datasets", "heldout_cases"):
        assert after[table] == before[table], table
    assert fleet.adapter_folders() == folders
    assert fleet.served() == served
    assert fleet.state(live) == "deployed"
    assert _digests(fleet.client.workspace.data_dir / dataset.path) == digests
    assert fleet.client.datasets.verify(dataset.id) == dataset
    untouched = fleet.experience(experience_id)
    assert (untouched.state, untouched.num_rejections) == ("reserved", 0)
    [attempt] = fleet.attempts(run_id)
    assert not (fleet.folder(run_id, attempt) / "artifact").exists()


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("damage", ["flip", "swap", "remove"])
def test_dataset_changed_after_queueing_is_refused_before_training(make_fleet: MakeFleet, damage: str) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    other = fleet.submit(first=1000)
    folder = _dataset_folder(fleet, run_id)
    match damage:
        case "flip":
            content = bytearray((folder / "train.parquet").read_bytes())
            content[len(content) // 2] ^= 1
            (folder / "train.parquet").write_bytes(content)
        case "swap":
            elsewhere = _dataset_folder(fleet, other)
            shutil.rmtree(folder)
            shutil.copytree(elsewhere, folder)
        case "remove":
            shutil.rmtree(folder)
    fleet.work()
    run = fleet.client.runs.get(run_id)
    [attempt] = fleet.attempts(run_id)
    assert (run.state, attempt.outcome, attempt.error_class) == ("failed", "failed", "data")
    assert run.dataset_id in run.reason
    assert not (fleet.folder(run_id, attempt) / "spec.json").exists(), "the trainer was started"
    assert fleet.state(other) == "deployed"


def _dataset_folder(fleet: Fleet, run_id: str) -> Path:
    dataset, _ = fleet.client.datasets.show(fleet.client.runs.get(run_id).dataset_id)
    return fleet.client.workspace.data_dir / dataset.path


def test_failed_run_tried_again_is_a_new_run_with_a_parent(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"script": "fail", "error_class": "config"})
    old = fleet.submit()
    experience_id = fleet.an_experience(fleet.client.runs.get(old).dataset_id)
    fleet.work()
    assert fleet.state(old) == "failed"
    assert fleet.experience(experience_id).state == "collected"
    path = fleet.root / "profiles" / f"{PROFILE}.yaml"
    path.write_text(path.read_text().replace("script: fail", "script: finish"))
    new = fleet.client.runs.retry(old).id
    fleet.work()
    assert fleet.client.runs.get(new).parent_id == old
    assert (fleet.state(old), fleet.state(new)) == ("failed", "deployed")
