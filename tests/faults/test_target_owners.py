"""A target owns only what it made, and one place belongs to one profile: nobody moves or removes another one's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.candidates import a_candidate
from support.fleet import Fleet, MakeFleet
from support.ollama_server import BASE, OllamaServer
from support.target_worlds import Made, shared_adapters
from support.vllm_server import VllmServer
from support.workspaces import PROFILE, a_profile, cli
from tunesmith.core.errors import ConfigError
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.directory import DirectoryTarget
from tunesmith.deployment.targets.registry import make_target

OTHER = "other"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return shared_adapters(tmp_path_factory.getbasetemp() / "adapters-of-targets")


def a_folder(path: str, name: str = "directory") -> dict[str, Any]:
    return {"name": name, "options": {"path": path}}


def deployed(fleet: Fleet, profile: str, path: str) -> str:
    run_id = a_candidate(fleet.client, profile=profile, targets=[a_folder(path)]).run_id
    assert run_id is not None
    fleet.work()
    return fleet.state(run_id)


def test_second_profile_with_the_first_ones_folder_is_refused_everywhere(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"targets": [a_folder("live")]})
    assert deployed(fleet, PROFILE, "live") == "deployed"
    served = fleet.served(folder="live")
    a_profile(fleet.root, OTHER, targets=[a_folder("./live/")])
    with pytest.raises(ConfigError, match=r"live is the folder of target directory of profile support too"):
        fleet.client.profiles.check(OTHER)
    told = cli("profile", "check", OTHER, cwd=fleet.root)
    assert (told.code != 0, "is the folder of target" in told.err) == (True, True)
    broken = {check.name for check in fleet.client.system.doctor() if check.state == "broken"}
    assert {f"targets of {OTHER}", f"targets of {PROFILE}"} <= broken
    # one that was submitted before the other took the folder is held, and nothing of the first is touched
    assert deployed(fleet, OTHER, "live") == "held"
    assert (fleet.served(folder="live"), fleet.client.adapters.live(OTHER)) == (served, None)
    assert sorted(os.listdir(fleet.root / "live" / "versions")) == [f"{PROFILE}@v1"]


@pytest.mark.parametrize("path", ["live/versions/x", "models/../live", "link", "live/sub", "."])
def test_folder_inside_or_behind_another_ones_is_refused(make_fleet: MakeFleet, path: str) -> None:
    fleet = make_fleet(profile={"targets": [a_folder("live")]})
    (fleet.root / "live").mkdir()
    (fleet.root / "link").symlink_to(fleet.root / "live")
    a_profile(fleet.root, OTHER, targets=[a_folder(path)])
    with pytest.raises(ConfigError, match="name another"):
        fleet.client.profiles.check(OTHER)


@pytest.mark.parametrize(
    "targets",
    [
        [a_folder("live"), a_folder("live", "second")],
        [{"name": "a", "kind": "embedded"}, {"name": "b", "kind": "embedded", "options": {"timeout_s": 5}}],
        [{"name": n, "kind": "vllm", "options": {"url": "http://127.0.0.1:8000"}} for n in "ab"],
    ],
)
def test_two_targets_of_one_profile_that_are_one_are_refused(make_fleet: MakeFleet, targets: list[Any]) -> None:
    fleet = make_fleet(profile={"targets": targets})
    with pytest.raises(ConfigError, match=r"one of them is enough|belongs to one target"):
        fleet.client.profiles.check(PROFILE)


@pytest.mark.parametrize("path", [".tunesmith/adapters", ".tunesmith", ".tunesmith/live", "..", "/"])
def test_folder_of_the_workspace_itself_is_no_place_for_versions(tmp_path: Path, path: str) -> None:
    root = tmp_path / "ws"
    root.mkdir()
    with pytest.raises(ConfigError, match="holds the workspace"):
        DirectoryTarget({"path": path}, root=root, profile=PROFILE)


def test_foreign_folders_below_versions_stay(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    assert deployed(fleet, PROFILE, "live") == "deployed"
    versions = fleet.root / "live" / "versions"
    for name in ("notes", f"{PROFILE}@v77", "backup@v1"):
        (versions / name).mkdir()
        (versions / name / "mine.txt").write_text("mine")
    for _ in range(3):
        assert deployed(fleet, PROFILE, "live") == "deployed"
    left = set(os.listdir(versions))
    assert left == {"notes", f"{PROFILE}@v77", "backup@v1", f"{PROFILE}@v3", f"{PROFILE}@v4"}
    assert (versions / f"{PROFILE}@v77" / "mine.txt").read_text() == "mine"


def test_foreign_folder_with_the_name_of_the_next_version_is_not_overwritten(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    foreign = fleet.root / "live" / "versions" / f"{PROFILE}@v1"
    foreign.mkdir(parents=True)
    (foreign / "mine.txt").write_text("mine")
    assert deployed(fleet, PROFILE, "live") == "held"
    assert (foreign / "mine.txt").read_text() == "mine"


def test_folder_of_a_tunesmith_that_kept_no_list_is_taken_over(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    for _ in range(2):
        assert deployed(fleet, PROFILE, "live") == "deployed"
    shutil.rmtree(fleet.root / "live" / ".tunesmith-target")
    assert deployed(fleet, PROFILE, "live") == "deployed"
    assert sorted(os.listdir(fleet.root / "live" / "versions")) == [f"{PROFILE}@v2", f"{PROFILE}@v3"]


def test_folder_of_another_workspace_is_refused_and_of_one_that_moved_is_taken_along(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    shared = str(tmp_path / "shared")
    first, second = make_fleet("one"), make_fleet("two")
    assert deployed(first, PROFILE, shared) == "deployed"
    before = first.served(folder=shared)
    assert deployed(second, PROFILE, shared) == "held"
    [item] = second.client.system.inbox()
    assert "belongs to profile support of the workspace" in item.reason
    assert first.served(folder=shared) == before
    first.client.close()
    shutil.rmtree(first.root)
    second.client.adapters.approve(f"{PROFILE}@v1")
    second.work()
    assert second.served(folder=shared) == second.client.adapters.show(f"{PROFILE}@v1").digest
    owner = json.loads((tmp_path / "shared" / ".tunesmith-target" / "owner.json").read_text())
    assert owner["workspace"] == str(second.root)


def test_ollama_models_of_others_are_neither_listed_nor_removed(made: Made, tmp_path: Path) -> None:
    with OllamaServer() as server:
        server.models |= {"support:latest": server.models[BASE], "support:v9": server.models[BASE]}
        target = make_target("ollama", {"url": server.url, "model": BASE}, root=tmp_path, profile=PROFILE)
        target.load(made.first)
        assert target.loaded() == {made.first.name}
        for name in ("support@latest", "support@v9", made.first.name):
            target.unload(name)
        assert set(server.models) == {BASE, "support:latest", "support:v9"}
        elsewhere = make_target("ollama", {"url": server.url, "model": BASE}, root=tmp_path / "two", profile=PROFILE)
        target.load(made.first)
        other = ServedAdapter(made.first.name, made.second.path, made.second.digest)
        refusal = elsewhere.refusal(other)
        assert refusal is not None
        assert "was not made here" in refusal
        elsewhere.unload(made.first.name)
        assert "support:v1" in server.models


def test_vllm_versions_of_another_workspace_are_neither_listed_nor_unloaded(made: Made, tmp_path: Path) -> None:
    with VllmServer() as server:
        ours, theirs = (
            make_target("vllm", {"url": server.url}, root=tmp_path / name, profile=PROFILE) for name in ("one", "two")
        )
        theirs.load(made.second)
        ours.load(made.first)
        assert (ours.loaded(), theirs.loaded()) == ({made.first.name}, {made.second.name})
        ours.unload(made.second.name)
        assert made.second.name in server.adapters
        with pytest.raises(TargetError, match="unload it there"):
            ours.load(ServedAdapter(made.second.name, made.first.path, made.first.digest))
