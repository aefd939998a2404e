"""From experiences to a deployed adapter, and to a rejected one, by the real command line and a real worker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support.workspaces import PROFILE, a_workspace, cli, work_here
from tunesmith.client import Client

MIX = {"min_new": 10, "max_examples": 60}
NUM, NUM_CORRECTED = 60, 12


@pytest.fixture
def client(tmp_path: Path) -> Any:
    profile = {"experience": {"mix": MIX}, "data": {"heldout_share": 0.3, "screens": "none"}, "gate": {"min_cases": 5}}
    with a_workspace(tmp_path, profile=profile) as made:
        _fill(made)
        yield made


def _fill(client: Client, first: int = 0) -> None:
    for number in range(first, first + NUM):
        talk = [
            {"role": "user", "content": f"Tell me about the town {number}"},
            {"role": "assistant", "content": f"The town {number} is old."},
        ]
        added = client.experiences.add(PROFILE, talk, task_type="towns")
        if number < first + NUM_CORRECTED:
            client.feedback.add(added.id, "down", rater="ann", correction=f"The town {number} is new.")


def _states(client: Client) -> dict[str, int]:
    return client.experiences.stats(PROFILE)[0].states


def test_help_says_what_it_does_with_an_example(tmp_path: Path) -> None:
    said = cli("dataset", "assemble", "--help", cwd=tmp_path)
    assert said.code == 0
    assert "tunesmith dataset assemble support" in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines())


def test_run_without_data_and_without_experience_says_what_to_give_it(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as made:
        refused = cli("run", "submit", PROFILE, cwd=made.workspace.root)
    assert (refused.code, refused.out) == (1, "")
    assert "no experience to assemble" in refused.err
    assert f"tunesmith run submit {PROFILE} FILES" in refused.err


def test_assembled_dataset_shows_its_mix_and_its_experiences_show_it(client: Client) -> None:
    root = client.workspace.root
    preview = cli("dataset", "assemble", PROFILE, "--dry-run", "--json", cwd=root)
    assert preview.code == 0, preview.err
    assert preview.json["roles"]["corrected"] > 0
    assert _states(client) == {"collected": NUM}
    made = cli("dataset", "assemble", PROFILE, "--task-type", "towns", "--seed", "7", cwd=root)
    assert made.code == 0, made.err
    dataset_id = made.last_line
    assert dataset_id.startswith("ds-")
    for text in ("Mix of what is trained", "corrected", "nothing was learnt before", "experiences.jsonl"):
        assert text in made.out
    assert all(len(line) <= 80 for line in made.out.splitlines() if "fingerprint" not in line), made.out
    shown = cli("dataset", "show", dataset_id, "--json", cwd=root).json
    assert shown["report"]["mix"]["policy"]["seed"] == 7
    one = client.experiences.list(profile=PROFILE, state="reserved")[0]
    page = cli("experience", "show", one.id, cwd=root)
    assert "Datasets it was in" in page.out
    assert page.out.count(dataset_id) >= 3  # its reservation, the dataset, its history
    again = cli("dataset", "assemble", PROFILE, cwd=root)
    assert again.code == 1
    assert "experience.mix.min_new" in again.err
    assert "reserved by another dataset" in again.err
    looked = cli("dataset", "assemble", PROFILE, "--dry-run", cwd=root)
    assert (looked.code, looked.err) == (1, again.err)


def test_deployed_run_consumes_and_the_next_round_replays(client: Client) -> None:
    root = client.workspace.root
    first = cli("run", "submit", PROFILE, cwd=root)
    assert first.code == 0, first.err
    assert _states(client) == {"reserved": NUM}
    work_here(client)
    run = client.runs.get(first.last_line)
    assert run.state == "deployed", run.reason
    adapter = client.adapters.live(PROFILE)
    assert adapter is not None
    one = client.experiences.show(client.experiences.list(profile=PROFILE)[0].id)
    assert (one.dataset_id, one.run_id, one.adapter_id) == (run.dataset_id, run.id, adapter.id)
    assert _states(client) == {"consumed": NUM}
    _says_who_learnt_it(client, adapter.id)
    _fill(client, 1000)
    second = client.runs.submit(PROFILE, overrides=["trainer.options.quality=0.9"])
    report = client.datasets.show(second.dataset_id)[1]
    assert report.mix is not None
    assert report.mix.roles["replay"] > 0
    work_here(client)
    assert client.runs.get(second.id).state == "deployed"
    assert _states(client) == {"consumed": 2 * NUM}


def _says_who_learnt_it(client: Client, adapter_id: str) -> None:
    """Only what was trained on was learnt; what is held out judged the version."""
    expected = {
        "train": f"learnt by {adapter_id}",
        "validation": f"validation it measured the training of {adapter_id}, and was not learnt",
        "heldout": f"held out it judged {adapter_id}, and is never learnt",
    }
    listed = client.experiences.list(profile=PROFILE, limit=100)
    by_split = {client.experiences.show(each.id).datasets[0].split: each.id for each in listed}
    assert by_split.keys() == expected.keys()
    for split, told in expected.items():
        page = " ".join(cli("experience", "show", by_split[split], cwd=client.workspace.root).out.split())
        assert told in page
        assert split == "train" or "learnt by" not in page


def test_rejected_run_gives_back_and_counts_and_the_second_rejection_asks_a_person(client: Client) -> None:
    for number in (1, 2):
        run = client.runs.submit(PROFILE, overrides=["trainer.options.quality=-0.5"])
        work_here(client)
        assert client.runs.get(run.id).state == "rejected"
        assert _states(client) == {"collected": NUM}
        found = [client.experiences.show(each.id) for each in client.experiences.list(profile=PROFILE, limit=100)]
        assert Counter((each.num_rejections, each.in_review) for each in found) == {(number, number == 2): NUM}
    refused = cli("run", "submit", PROFILE, cwd=client.workspace.root)
    assert refused.code == 1
    assert "waiting for a review" in refused.err


def test_run_that_cannot_be_queued_lets_go_of_what_was_assembled_for_it(client: Client) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        client.runs.submit(PROFILE, parent_id="run-that-nobody-knows")
    assert len(client.datasets.list(PROFILE)) == 1
    assert _states(client) == {"collected": NUM}
    assert client.runs.submit(PROFILE).is_new
