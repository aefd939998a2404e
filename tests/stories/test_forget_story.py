"""Forgetting beside real workers: a run that learns from it ends, the text goes, and a retry trains on what is left."""

from __future__ import annotations

from support.fleet import Fleet, MakeFleet
from support.forgotten import add, everything_on_disk, everything_stored
from support.workspaces import PROFILE, wait_for
from tunesmith.datasets.example import Split
from tunesmith.experience.queries import members

POLICY = {"experience": {"mix": {"min_new": 10}}, "deploy": {"when": "never"}}


def _a_training(fleet: Fleet) -> tuple[str, str, str]:
    """A run that trains on assembled experiences; run, dataset, and an experience that it trains on."""
    for number in range(60):
        add(fleet.client, f"Where does order {number} go, and when?", f"Order {number} goes to place {number * 7}.")
    run = fleet.client.runs.submit(PROFILE)
    with fleet.database.read() as tx:
        known = next(each for each in members.of_dataset(tx, run.dataset_id) if each.split is Split.TRAIN)
    return run.id, run.dataset_id, known.experience_id


def test_training_on_what_is_forgotten_ends_and_a_retry_trains_on_what_is_left(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"steps": 60, "step_s": 0.05}, profile=POLICY)
    client = fleet.client
    run, dataset, known = _a_training(fleet)
    fleet.start()
    fleet.wait_for_step(run, 2)
    said = client.experiences.show(known).messages[0]["content"]
    told = client.experiences.forget([known], reason="asked")
    assert told.ends == (run,)
    assert [(each.dataset_id, each.state, each.runs) for each in told.outcomes] == [(dataset, "waits", (run,))]
    assert said not in everything_stored(fleet.database)
    assert fleet.wait(run, "cancelled")
    wait_for(
        lambda: not [item for item in client.system.inbox() if item.kind == "erasure"],
        20,
        f"for the erasure: {fleet.logs()[-2000:]}",
    )
    client.datasets.verify(dataset)
    assert said.encode() not in everything_on_disk(client.workspace.data_dir / "datasets")
    assert said.encode() not in everything_on_disk(client.workspace.runs_dir)
    assert client.runs.show(run).num_erased == 1
    assert client.experiences.preview_forget([known]).adapters == ()
    with fleet.database.read() as tx:
        states = {
            client.experiences.show(each.experience_id).experience.state for each in members.of_dataset(tx, dataset)
        }
    assert states == {"forgotten", "collected"}  # the others are free again
    again = client.runs.retry(run)
    assert fleet.wait(again.id, "completed")


def test_queued_run_never_trains_on_what_is_forgotten(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"steps": 3}, profile=POLICY)
    client = fleet.client
    run, _, known = _a_training(fleet)
    said = client.experiences.show(known).messages[0]["content"]
    told = client.experiences.forget([known], reason="asked")
    assert (told.ends, [each.state for each in told.outcomes]) == ((run,), ["done"])
    assert said.encode() not in everything_on_disk(client.workspace.data_dir / "datasets")
    again = client.runs.retry(run)
    fleet.start()
    assert fleet.wait(again.id, "completed")
    assert client.runs.show(run).run.state == "cancelled"
    assert client.runs.show(run).attempts == ()
