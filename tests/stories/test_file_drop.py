"""Another program asks for rounds through a folder: the real command line, a worker, and everything it reads."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE, a_jsonl, cli, start_command, wait_for
from tunesmith.runs.queries import runs
from tunesmith.runs.queries.runs import Run
from tunesmith.store import events

PATIENT = {"window": "03:00-03:01", "triggers": {"new_data": None, "age": None}}


@pytest.fixture
def fleet(make_fleet: MakeFleet, store: str | None) -> Fleet:
    made = make_fleet(store=store, options={"quality": 0.3, "steps": 2}, profile={"campaign": PATIENT})
    made.client.campaigns.create(PROFILE, name="helpdesk")
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared folder"
    made.mkdir(mode=0o750)
    a_jsonl(made / "new.jsonl")
    return made


def ask(folder: Path, request_id: str, **said: Any) -> None:
    (folder / "pending.tmp").write_text(json.dumps({"v": 1, "id": request_id, **said}))
    os.replace(folder / "pending.tmp", folder / "pending.json")


def result(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "result.json").read_text()))
    except FileNotFoundError:
        return {}


def archived(folder: Path) -> list[tuple[str, str]]:
    """Id and state of every answered request, the oldest first."""
    kept = sorted((folder / "archive").iterdir())
    answers = [json.loads((each / "result.json").read_text()) for each in kept]
    assert [json.loads((each / "pending.json").read_text())["id"] for each in kept] == [one["id"] for one in answers]
    return [(answer["id"], answer["state"]) for answer in answers]


def all_runs(fleet: Fleet) -> list[Run]:
    with fleet.database.read() as tx:
        return list(reversed(runs.listing(tx)))


@ON_SQLITE
def test_requests_are_answered_one_after_another_to_their_end(fleet: Fleet, folder: Path) -> None:
    ask(folder, "first", data="new.jsonl", asked_by="the CRM", metadata={"ticket": "T-17"})
    log = (folder.parent / "drop.log").open("wb")
    drop = start_command(
        ["campaign", "drop", str(folder), "--campaign", "helpdesk"], cwd=fleet.root, env=None, sink=log
    )
    fleet.processes.append(drop)
    wait_for(lambda: result(folder).get("state") == "queued", what="for the round")
    ask(folder, "second", campaign="helpdesk")
    assert cli("campaign", "drop", folder, "--once", cwd=fleet.root).err.startswith("another process answers")
    assert (folder / "pending.json").exists(), "it waits for its turn"
    fleet.work()
    assert drop.wait(30) == 0
    log.close()
    assert archived(folder) == [("first", "deployed"), ("second", "refused")]
    [first, _] = sorted((folder / "archive").iterdir())
    answer = json.loads((first / "result.json").read_text())
    [run] = all_runs(fleet)
    assert (answer["run"], answer["version"], answer["campaign"]) == (run.id, f"{PROFILE}@v1", "helpdesk")
    assert answer["score"]["after"] < answer["score"]["before"]
    assert answer["score"]["gain"] > 0
    assert (run.automatic, run.spec.metadata["asked.ticket"], run.spec.metadata["asked_by"]) == (
        True,
        "T-17",
        "the CRM",
    )
    assert "minimum new: 0 new examples" in result(folder)["reason"]
    assert result(folder)["code"] == "refused"
    with fleet.database.read() as tx:
        told = [event.reason for event in events.of_entity(tx, "campaign", str(run.campaign_id))]
    assert any("asked for by the CRM, through the file drop, request first" in reason for reason in told)
    lines = (folder.parent / "drop.log").read_text().splitlines()
    assert lines[1] == f"request first: {run.id} queued: waits for a worker"
    assert sorted(path.name for path in folder.iterdir()) == ["archive", "new.jsonl", "result.json"]


@ON_SQLITE
def test_what_nobody_may_waive_refuses_a_request_and_the_rest_is_waived(fleet: Fleet, folder: Path) -> None:
    def answer(request_id: str, *words: str, **said: Any) -> dict[str, Any]:
        ask(folder, request_id, **said)
        done = cli("campaign", "drop", folder, "--once", *words, cwd=fleet.root)
        assert (done.code, done.err) == (0, "")
        return result(folder)

    data = {"data": "new.jsonl"}
    fleet.client.system.estop(True, "a drill")
    assert "emergency stop: on" in answer("a", campaign="helpdesk", **data)["reason"]
    fleet.client.system.estop(False)
    assert "campaign: paused" in _paused(fleet, lambda: answer("b", profile=PROFILE, **data))["reason"]
    assert answer("c", profile="suport", **data)["code"] == "not_found"
    assert answer("d", campaign="helpdsk", **data)["reason"].startswith(
        "no campaign 'helpdsk'; did you mean 'helpdesk'?"
    )
    assert answer("e", **data)["reason"] == "the request names neither a campaign nor a profile"
    first = answer("a", campaign="helpdesk", **data)  # a refused request is looked at anew
    assert (first["state"], first["is_final"]) == ("queued", False), "window and triggers are waived"
    other = folder.parent / "other"
    other.mkdir()
    a_jsonl(other / "new.jsonl", first=500)
    ask(other, "g", **data)
    assert cli("campaign", "drop", other, "--once", "--campaign", "helpdesk", cwd=fleet.root).code == 0
    assert f"unfinished round: {first['run']} is queued" in result(other)["reason"]
    fleet.client.runs.cancel(first["run"])
    assert answer("a", campaign="helpdesk", **data)["run"] == first["run"], "the same request again: the same answer"
    assert result(folder)["state"] == "cancelled"
    conflict = answer("a", profile=PROFILE, **data)
    assert (conflict["state"], conflict["code"], conflict["run"]) == ("refused", "conflict", None)
    assert len(all_runs(fleet)) == 1
    states = [state for _, state in archived(folder)]
    assert states == ["refused"] * 5 + ["cancelled", "cancelled", "refused"]


def _paused(fleet: Fleet, action: Any) -> dict[str, Any]:
    fleet.client.campaigns.pause("helpdesk")
    done = dict(action())
    fleet.client.campaigns.resume("helpdesk")
    return done


def test_two_processes_at_once_open_one_run(fleet: Fleet, tmp_path: Path) -> None:
    """Requests in two folders: no lock is shared, so the store alone decides, as between two machines."""
    folders = [tmp_path / "drop-1", tmp_path / "drop-2"]
    for folder in folders:
        folder.mkdir()
        a_jsonl(folder / "new.jsonl")
        ask(folder, "same", campaign="helpdesk", data="new.jsonl")
    log = (tmp_path / "drop.log").open("wb")
    for folder in folders:
        words = ["campaign", "drop", str(folder), "--once"]
        fleet.processes.append(start_command(words, cwd=fleet.root, env=None, sink=log))
    assert [process.wait(60) for process in fleet.processes] == [0, 0], (tmp_path / "drop.log").read_text()
    log.close()
    [run] = all_runs(fleet)
    told = {(result(folder)["run"], result(folder)["state"]) for folder in folders}
    assert told == {(run.id, "queued"), (None, "refused")}


@ON_SQLITE
def test_one_id_in_two_folders_names_two_requests(fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o750)
    for each in (folder, other):
        ask(each, "2026-11-17", campaign="helpdesk", data="new.jsonl")
        assert cli("campaign", "drop", each, "--once", cwd=fleet.root).code == 0
    [run] = all_runs(fleet)
    assert (result(folder)["state"], result(folder)["run"]) == ("queued", run.id)
    kept = [json.loads((each / "result.json").read_text()) for each in (other / "archive").iterdir()]
    assert [(each["state"], each["run"]) for each in kept] == [("refused", None)], "it has no new.jsonl of its own"


@ON_SQLITE
def test_program_of_the_documentation_gets_its_answers(fleet: Fleet, folder: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "file-drop.md").read_text()
    program: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], program)
    with ThreadPoolExecutor() as pool:  # the second one waits until the first file was taken
        asked = [pool.submit(program["ask_for_round"], folder, campaign=name) for name in ("helpdesk", "none")]
        while not all(each.done() for each in asked):
            assert fleet.client.file_drops.answer(folder, once=True)
            time.sleep(0.05)
    first, second = (each.result() for each in asked)
    assert "minimum new" in first["reason"]
    assert second["reason"].startswith("no campaign 'none'")
    assert len(archived(folder)) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["archive", "new.jsonl", "result.json"]


@ON_SQLITE
def test_units_are_printed_and_written(fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    words = ["campaign", "drop", str(folder), "--campaign", "helpdesk", "--keep", "5"]
    printed = cli(*words, "--print-units", cwd=fleet.root).out
    assert f"PathExists={folder}/pending.json\n" in printed
    assert f'"campaign" "drop" "{folder}" "--campaign" "helpdesk" "--keep" "5"\n' in printed
    written = cli(*words, "--write-units", str(tmp_path), cwd=fleet.root)
    [path] = tmp_path.glob("*.path")
    assert written.last_line == f"systemctl --user enable --now {path.name}"
    assert path.read_text() in printed
    assert path.with_suffix(".service").read_text() in printed
    assert not (folder / "archive").exists()
