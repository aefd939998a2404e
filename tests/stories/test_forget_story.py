"""Forgetting beside real workers: a training reads its dataset to the end, or is stopped, and then the text is gone."""

from __future__ import annotations

import pytest

from builders import PROFILE, wait_for
from forgotten_builders import add, everything_on_disk, everything_stored
from story_builders import Fleet, MakeFleet
from tunesmith.domain.example import Split
from tunesmith.store import members

POLICY = {"experience": {"mix": {"min_new": 10}}, "deploy": {"when": "never"}}


def _a_training(fleet: Fleet) -> tuple[str, str, str]:
    """A run that trains on assembled experiences; run, dataset, and an experience that it trains on."""
    for number in range(60):
        add(fleet.client, f"Where does order {number} go, and when?", f"Order {number} goes to place {number * 7}.")
    run = fleet.client.runs.submit(PROFILE)
    with fleet.database.read() as tx:
        known = next(each for each in members.of_dataset(tx, run.dataset_id) if each.split is Split.TRAIN)
    return run.id, run.dataset_id, known.experience_id


@pytest.mark.parametrize("stop_runs", [False, True])
def test_erasure_waits_for_a_training_or_ends_it(make_fleet: MakeFleet, stop_runs: bool) -> None:
    steps = 100_000 if stop_runs else 60
    fleet = make_fleet(options={"steps": steps, "step_s": 0.05}, profile=POLICY)
    client = fleet.client
    run, dataset, known = _a_training(fleet)
    fleet.start()
    fleet.wait_for_step(run, 2)
    said = client.experiences.show(known).messages[0]["content"]
    told = client.experiences.forget([known], reason="asked", stop_runs=stop_runs)
    assert [(each.dataset_id, each.state, each.runs) for each in told.outcomes] == [(dataset, "waits", (run,))]
    assert said not in everything_stored(fleet.database)
    assert fleet.wait(run, "cancelled" if stop_runs else "completed")
    wait_for(lambda: client.system.inbox() == [], 20, f"for the erasure: {fleet.logs()[-2000:]}")
    client.datasets.verify(dataset)
    assert said.encode() not in everything_on_disk(client.workspace.data_dir / "datasets")
    assert said.encode() not in everything_on_disk(client.workspace.runs_dir)
    assert client.runs.show(run).num_erased == 1
    adapters = client.experiences.preview_forget([known]).adapters
    assert [each.contains for each in adapters] == ([] if stop_runs else [True])
    with fleet.database.read() as tx:
        states = {
            client.experiences.show(each.experience_id).experience.state for each in members.of_dataset(tx, dataset)
        }
    assert states == {"forgotten", "collected" if stop_runs else "consumed"}  # the others go their way
    again = client.runs.submit(PROFILE, dataset)  # what is left can be trained on
    assert fleet.wait(again.id, "training", "completed")
