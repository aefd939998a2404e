"""A near copy of a case that the profile's runs are judged on is quarantined, on both databases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.rows import a_run
from support.screen_whole_sets import World, a_line
from support.workspaces import PROFILE, a_workspace
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Database


@pytest.mark.parametrize(("end", "is_blocked"), [(RunState.DEPLOYED, True), (RunState.FAILED, False)])
def test_near_copies_of_judging_cases_are_never_trained(
    tmp_path: Path, store_url: str, database: Database, end: RunState, is_blocked: bool
) -> None:
    world = World(8)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    rows = [a_line(world.question(), world.answer()) for _ in range(60)]
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"store": {"url": store_url}}
    with a_workspace(tmp_path / "work", profile={"data": {"screens": "none"}}, settings=settings) as client:
        before, _ = client.datasets.prepare(PROFILE, [first])
        with database.write() as tx:
            a_run(tx, end, dataset_id=before.id)
            own = datasets.pool(tx, PROFILE, before.id, 1000)
        asked = [case.messages[-2]["content"] for case in own]
        copies = [
            a_line(f"{question} Tell me for {world.text(1, 1)} {n}.", "It is so.")
            for n in range(10)
            for question in asked
        ]
        fresh = [a_line(world.question(), world.answer()) for _ in range(60)]
        second.write_text("".join(json.dumps(row) + "\n" for row in [*fresh, *copies]))
        dataset, report = client.datasets.prepare(PROFILE, [second])
    found = {each.screen: each for each in report.quarantine}
    assert ("evaluation_overlap" in found) is is_blocked
    num_copies = len(copies) - dataset.counts[Split.HELDOUT.value]
    assert not is_blocked or found["evaluation_overlap"].num >= num_copies
