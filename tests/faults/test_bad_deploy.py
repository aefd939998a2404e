"""A bad version is forced live while people ask: the watch finds it by its answers and rolls it back, with evidence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support import tables
from support.candidates import a_candidate
from support.fleet import Fleet
from support.flips import a_workspace_of_letters, letter_of, references_of
from support.gateway import PROFILE, ServerProcess, a_server
from support.native import a_base_ref
from support.rows import force
from support.workspaces import a_profile, cli, wait_for
from tunesmith.core.clock import utc_now
from tunesmith.experience.queries import assessments
from tunesmith.profiles.profile import Watch
from tunesmith.runs.queries import tasks
from tunesmith.store import events

GOOD, BAD = f"{PROFILE}@v1", f"{PROFILE}@v2"
WATCH = {
    "for_s": 0.1,
    "interval_s": 0.1,
    "quality": {"min_answers": 20, "answers": 2000, "min_s": 60.0, "max_s": 600.0},
}
QUESTION = f'Write "{letter_of(GOOD) * 4}" for me'
"""Only the good version keeps what stands in quotes."""


@dataclass
class Load:
    """People who ask without a pause."""

    server: ServerProcess
    answers: list[tuple[datetime, str]] = field(default_factory=list)
    """When each ended, and the version that gave it."""
    errors: list[str] = field(default_factory=list)
    is_over: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, num_people: int) -> Load:
        self.threads = [threading.Thread(target=self._ask) for _ in range(num_people)]
        for thread in self.threads:
            thread.start()
        return self

    def _ask(self) -> None:
        with self.server.openai() as api:
            while not self.is_over:
                said: list[Any] = [{"role": "user", "content": QUESTION}]
                try:
                    answer = api.chat.completions.create(model=PROFILE, messages=said, max_tokens=4, temperature=0)
                    self.answers.append((utc_now(), answer.model))
                except Exception as error:  # told at the end
                    self.errors.append(repr(error))
                    return
                time.sleep(0.01)

    def num(self, version: str) -> int:
        return sum(model == version for _, model in list(self.answers))

    def end(self) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join(30.0)


def a_held_version(fleet: Fleet) -> str:
    """The next version of letters, which waits for a person; its run."""
    base, letter = fleet.root / "models" / "tiny", fleet.client.workspace.adapters_dir / letter_of(BAD)
    watch = Watch.model_validate(WATCH)
    made = a_candidate(
        fleet.client, folder=letter, references=references_of(base, letter), base=a_base_ref(base), watch=watch
    )
    assert made.name == BAD
    assert made.run_id is not None
    with fleet.database.write() as tx:
        task = tasks.open_of_run(tx, made.run_id)
        assert task is not None
        force(tx, tables.tasks, task.id, state="cancelled")
        force(tx, tables.runs, made.run_id, state="held")
    return made.run_id


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(a_workspace_of_letters(tmp_path / "ws", 1))
    a_profile(
        fleet.root,
        PROFILE,
        recipe={"max_length": 256},
        experience={"capture": {"finished_only": False}, "verifiers": {"entity_preservation": {}}},
        watch=WATCH,
    )
    yield fleet
    fleet.end()


def test_forced_bad_version_is_rolled_back_under_load_within_2_seconds_of_the_decision(fleet: Fleet) -> None:
    with a_server(fleet.root) as server:
        load = Load(server).start(4)
        try:
            wait_for(lambda: load.num(GOOD) >= 60, 60.0, "for answers before the flip")
            wait_for(lambda: _captured(fleet) >= 40, 30.0, "for their capture")
            run_id = a_held_version(fleet)
            fleet.start()
            assert fleet.client.adapters.deploy(BAD, force=True, reason="somebody is sure of it").id == run_id
            fleet.wait(run_id, "rolled_back", timeout_s=90.0)
            rolled_back_at = utc_now()
            wait_for(lambda: load.answers[-1][0] > rolled_back_at and load.answers[-1][1] == GOOD, 30.0, "to be back")
            wait_for(lambda: _synced_at(fleet, run_id) is not None, 30.0, "for the target")
        finally:
            load.end()
    assert load.errors == []
    assert load.num(BAD) >= 10
    _check_record(fleet, run_id)
    decided_at, synced_at = _decided_at(fleet, run_id), _synced_at(fleet, run_id)
    assert synced_at is not None
    last_bad = max(at for at, model in load.answers if model == BAD)
    to_target, to_people = (synced_at - decided_at).total_seconds(), (last_bad - decided_at).total_seconds()
    print(
        f"\n{load.num(BAD)} bad answers; every target served the old version {to_target:.2f} s after the decision, "
        f"and the last bad answer ended after {to_people:.2f} s"
    )
    assert to_target <= 2.0
    assert to_people <= 2.0


def _captured(fleet: Fleet) -> int:
    with fleet.database.read() as tx:
        return sum(num for *_, num in assessments.tally(tx, PROFILE))


def _check_record(fleet: Fleet, run_id: str) -> None:
    """What a person finds afterwards."""
    shown = fleet.client.runs.show(run_id)
    first = shown.watch[0]
    assert (first["signal"], first["rolls_back"]) == ("entity_preservation", True)
    assert (first["baseline_version"], first["live_version"]) == (GOOD, BAD)
    assert (first["baseline_mean"], first["live_mean"]) == (1.0, 0.0)
    assert first["baseline_n"] >= 20
    assert first["live_n"] >= 10
    assert first["bound"] > first["allowed"] == 0.02
    assert shown.run.reason == first["text"]
    assert {"finished", "errors", "latency"} <= {each["signal"] for each in shown.watch}, "the server counts requests"
    assert fleet.client.adapters.show(BAD).state == "rolled_back"
    live = fleet.client.adapters.live(PROFILE)
    assert live is not None
    assert live.name == GOOD
    page = cli("run", "show", run_id, cwd=fleet.root).out
    assert "Watch" in page
    assert "entity_preservation" in page
    spans = fleet.client.adapters.history(PROFILE)
    assert [(span.version, span.ended_as) for span in spans[-3:]] == [
        (GOOD, "superseded"), (BAD, "rolled_back"), (GOOD, None),
    ]  # fmt: skip
    assert spans[-2].ended_reason == first["text"]


def _decided_at(fleet: Fleet, run_id: str) -> datetime:
    with fleet.database.read() as tx:
        return next(e.at for e in events.of_entity(tx, "run", run_id) if e.new_state == "rolled_back")


def _synced_at(fleet: Fleet, run_id: str) -> datetime | None:
    """When the last target was seen with the old version, after the decision; None: not all have been."""
    good, decided_at = fleet.client.adapters.show(GOOD).id, _decided_at(fleet, run_id)
    with fleet.database.read() as tx:
        seen = events.of_entity(tx, "deployment", PROFILE)
    found = {
        e.detail["target"]: e.at
        for e in reversed(seen)
        if e.action == "observed" and e.detail["observed"] == good and e.at >= decided_at
    }
    return max(found.values()) if set(found) == {"directory", "tunesmith serve"} else None
