"""A workspace that an earlier tunesmith made (schema 0006, before packages were sorted by subject) opens and goes on.

The archive was made by that version's own code with the `sim` trainer: a deployed run, one paused with a checkpoint,
one queued, experiences with feedback, a suspect, and one that was forgotten.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import Fleet
from tunesmith.client import Client
from tunesmith.store.revisions import HEAD

ARCHIVE = Path(__file__).parent.parent / "fixtures" / "workspace_of_schema_0006.tar.xz"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    made = Fleet(Client(tmp_path / "ws", actor="user:test"))
    yield made
    made.end()


def run_in(fleet: Fleet, state: str) -> str:
    (run,) = fleet.client.runs.list(state=state)
    return run.id


def test_what_is_live_and_what_was_experienced_is_still_there(fleet: Fleet) -> None:
    client = fleet.client
    (live,) = client.adapters.list()
    assert (live.name, live.state) == ("support@v1", "live")
    assert fleet.served() == live.digest
    kept, suspect, gone = (client.experiences.show(f"support:{key}") for key in ("kept", "suspect", "gone"))
    assert [kept.experience.answer, suspect.experience.class_name] == ["365 days", "quarantined"]
    assert {rating.correction for rating in kept.feedback} == {None, "365 or 366 days"}
    assert (gone.experience.state, gone.messages) == ("forgotten", [])
    assert [run.state for run in client.runs.list()] == ["queued", "paused", "deployed"]
    assert [check for check in client.system.doctor() if check.state == "broken"] == []


def test_queued_and_paused_runs_are_refused_with_the_command_that_goes_on(fleet: Fleet) -> None:
    client = fleet.client
    queued, paused = run_in(fleet, "queued"), run_in(fleet, "paused")
    client.runs.resume(paused)
    fleet.work()
    for run_id in (queued, paused):
        detail = client.runs.show(run_id)
        assert detail.run.state == "failed"
        assert "tunesmith run retry" in detail.run.reason
    assert client.adapters.list()[0].name == "support@v1"
    again = client.runs.retry(queued, overrides=["trainer.options.quality=0.9"])
    fleet.work()
    assert fleet.state(again.id) == "deployed"
    assert fleet.served() == next(version.digest for version in client.adapters.list() if version.state == "live")


def test_the_schema_is_brought_up_to_date_once(fleet: Fleet) -> None:
    with fleet.client._session.database.read() as tx:
        assert tx.conn.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one() == HEAD
