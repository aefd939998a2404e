"""Who may read what a worker and its programs write: their own user, unless a target says otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import MakeFleet

OTHERS = 0o077


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    every = [folder, *folder.rglob("*")]
    return [str(path) for path in every if not path.is_symlink() and path.stat().st_mode & OTHERS]


def test_nothing_of_a_run_can_be_read_by_others(make_fleet: MakeFleet, usual_umask: None) -> None:
    fleet = make_fleet()
    workspace = fleet.client.workspace
    run_id = fleet.submit()
    fleet.start(until_idle=True).wait(60)
    assert fleet.state(run_id) == "deployed"
    assert list(workspace.runs_dir.rglob("stdout.json"))
    assert list(workspace.runs_dir.rglob("cases.jsonl"))
    for folder in (workspace.runs_dir, workspace.adapters_dir, workspace.data_dir / "live"):
        assert open_to_others(folder) == []
    assert os.umask(0o022) == 0o022, "who called the worker keeps its own umask"


def test_folders_of_an_earlier_version_are_closed(make_fleet: MakeFleet, usual_umask: None) -> None:
    fleet = make_fleet()
    runs_dir = fleet.client.workspace.runs_dir
    runs_dir.mkdir(exist_ok=True)
    runs_dir.chmod(0o755)
    fleet.client.runs.list()
    assert not runs_dir.stat().st_mode & OTHERS


@pytest.mark.parametrize(("readable_by", "folder", "file"), [("group", 0o750, 0o640), ("everyone", 0o755, 0o644)])
def test_directory_target_lets_those_read_for_whom_it_is(
    make_fleet: MakeFleet, usual_umask: None, readable_by: str, folder: int, file: int
) -> None:
    options = {"path": "served", "readable_by": readable_by}
    fleet = make_fleet(profile={"targets": [{"name": "shared", "kind": "directory", "options": options}]})
    run_id = fleet.submit()
    fleet.start(until_idle=True).wait(60)
    assert fleet.state(run_id) == "deployed"
    [version] = (fleet.root / "served" / "versions").iterdir()
    for path in (fleet.root / "served", version.parent, version):
        assert path.stat().st_mode & 0o777 == folder, path
    assert {path.stat().st_mode & 0o777 for path in version.iterdir()} == {file}
