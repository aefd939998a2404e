"""A workspace that is copied or moved goes on where it is, with its own files, and leaves the original alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_jsonl, a_workspace, cli
from tunesmith.client import Client
from tunesmith.config.spec_paths import located
from tunesmith.store import runs, tables

SLOW = ("trainer.options.steps=40", "trainer.options.step_s=0.1", "checkpoints.every_steps=2")


def copied(fleet: Fleet, *, move: bool = False) -> Fleet:
    """The same workspace at another place, as `cp -r` or `mv` leaves it."""
    place = fleet.root.with_name("copy")
    if move:
        fleet.client.close()
        fleet.root.rename(place)
    else:
        with contextlib.suppress(shutil.Error):  # what a program removes meanwhile
            shutil.copytree(fleet.root, place, symlinks=True, ignore=shutil.ignore_patterns("store.db-*"))
        data = Path(".tunesmith") / "store.db"
        with sqlite3.connect(fleet.root / data) as source, sqlite3.connect(place / data) as sink:
            source.backup(sink)  # as a careful operator does
    return Fleet(Client(place, actor="user:test"))


def hide(fleet: Fleet) -> Path:
    """Out of sight: whatever still looks for the original finds nothing."""
    fleet.client.close()
    return fleet.root.rename(fleet.root.with_name("hidden"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def inside(fleet: Fleet, text: str) -> bool:
    return Path(text).is_relative_to(fleet.root)


def test_queued_run_goes_on_in_the_copy_and_the_original_stays_as_it_was(make_fleet: MakeFleet) -> None:
    original = make_fleet()
    first = original.submit("trainer.options.quality=0.2")
    original.work()
    run_id = original.submit("trainer.options.quality=0.6", first=100)
    original.client.close()
    before = contents(original.root)
    copy = copied(original)
    copy.work()
    assert [copy.state(each) for each in (first, run_id)] == ["deployed", "deployed"], copy.client.runs.get(
        run_id
    ).reason
    told = copy.spec(run_id, copy.attempts(run_id)[0])["run"]
    assert all(inside(copy, told[part]["path"]) for part in ("base", "dataset", "start"))
    assert copy.served() == copy.client.adapters.show(f"{PROFILE}@v2").digest
    assert contents(original.root) == before
    copy.end()


def test_run_paused_in_training_resumes_from_its_checkpoint_in_the_copy(make_fleet: MakeFleet) -> None:
    original = make_fleet()
    run_id = original.submit(*SLOW)
    worker = original.start()
    original.wait_for_step(run_id, 6)
    original.client.runs.pause(run_id)
    original.wait(run_id, "paused")
    worker.terminate()
    worker.wait()
    before = contents(original.root)
    copy = copied(original)
    hidden = hide(original)
    copy.client.runs.resume(run_id)
    copy.work()
    assert copy.state(run_id) == "deployed", copy.client.runs.get(run_id).reason
    resumed = copy.spec(run_id, copy.attempts(run_id)[-1])["resume"]
    assert resumed["step"] >= 6
    assert inside(copy, resumed["path"])
    after = contents(hidden)
    assert {name: after[name] for name in before if "store.db" not in name} == {
        name: content for name, content in before.items() if "store.db" not in name
    }
    copy.end()


def test_copy_made_while_it_trains_neither_ends_nor_follows_the_programs_of_the_original(
    make_fleet: MakeFleet,
) -> None:
    original = make_fleet()
    run_id = original.submit(*SLOW)
    original.start()
    original.wait_for_step(run_id, 4)
    copy = copied(original)
    copy.work()  # the lease in its store runs out; the trainer of the original is none of its business
    assert copy.state(run_id) == "deployed"
    original.wait(run_id, "deployed", timeout_s=60)
    assert len(original.attempts(run_id)) == 1, "the original was not disturbed"
    assert original.served() is not None
    copy.end()


def test_moved_workspace_serves_what_it_served(make_fleet: MakeFleet) -> None:
    original = make_fleet()
    original.submit("trainer.options.quality=0.2")
    original.work()
    moved = copied(original, move=True)
    moved.submit("trainer.options.quality=0.6", first=100)
    moved.work()
    assert moved.served() == moved.client.adapters.show(f"{PROFILE}@v2").digest
    assert moved.client.adapters.rollback(PROFILE) == f"{PROFILE}@v1"
    moved.work()
    assert moved.served() == moved.client.adapters.show(f"{PROFILE}@v1").digest
    assert [check for check in moved.client.system.doctor() if check.state == "broken"] == []
    moved.end()


def test_spec_of_an_older_tunesmith_with_absolute_paths_runs_in_the_copy(make_fleet: MakeFleet) -> None:
    original = make_fleet()
    run_id = original.submit()
    with original.database.write() as tx:
        spec = located(original.client.workspace, runs.get(tx, run_id).spec).model_dump(mode="json")
        tx.run(tables.runs.update().where(tables.runs.c.id == run_id).values(spec=spec))
    assert spec["dataset"]["path"].startswith(str(original.root))
    original.client.close()
    copy = copied(original)
    hide(original)
    copy.work()
    assert copy.state(run_id) == "deployed", copy.client.runs.get(run_id).reason
    told = copy.spec(run_id, copy.attempts(run_id)[0])["run"]
    assert all(inside(copy, told[part]["path"]) for part in ("base", "dataset"))
    copy.end()


def test_base_outside_the_workspace_keeps_its_absolute_path(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet()
    shutil.move(fleet.root / "models" / "tiny", tmp_path / "elsewhere")
    profile = fleet.root / "profiles" / f"{PROFILE}.yaml"
    profile.write_text(profile.read_text().replace("models/tiny", str(tmp_path / "elsewhere")))
    run_id = fleet.submit()
    with fleet.database.read() as tx:
        spec = runs.get(tx, run_id).spec
    assert (spec.base.path, Path(spec.dataset.path).is_absolute()) == (str(tmp_path / "elsewhere"), False)
    fleet.work()
    assert fleet.state(run_id) == "deployed"


def test_servers_of_the_original_are_not_those_of_the_copy(make_fleet: MakeFleet) -> None:
    """Its file and its row are copied along, and its process lives: here, this one."""
    from tunesmith.gateway.presence import Presence
    from tunesmith.stages.followers import followers
    from tunesmith.store import servers
    from tunesmith.targets.base import TargetError
    from tunesmith.targets.registry import make_target

    original = make_fleet()
    presence = Presence(original.client.workspace)
    process = presence.announce("srv-1", "http://127.0.0.1:9", "token")
    from tunesmith.clock import utc_now
    from tunesmith.domain.serving import ServerState

    row = servers.Server("srv-1", os.uname().nodename, process, "http://127.0.0.1:9", "cpu", ServerState.SERVING, {},
                         {}, utc_now())  # fmt: skip
    with original.database.write() as tx:
        servers.register(tx, row, 60.0)
        assert [each.kind for each in followers(tx, [{}], original.client.workspace)] == ["directory", "embedded"]
    copy = copied(original)
    with copy.database.read() as tx:
        assert [each.kind for each in followers(tx, [{}], copy.client.workspace)] == ["directory"]
    with pytest.raises(TargetError, match="no server of this workspace runs"):
        make_target("embedded", {}, root=copy.root, profile=PROFILE).observe()
    presence.leave()
    copy.end()


def test_sqlite_store_named_by_a_relative_url_is_the_workspaces_own(tmp_path: Path) -> None:
    with a_workspace(tmp_path, settings={"store": {"url": "sqlite:///my.db"}}) as client:
        root = client.workspace.root
        client.runs.submit(PROFILE, a_jsonl(tmp_path / "data.jsonl"))
        assert (root / "my.db").is_file()
    for here in (root, root / "profiles", tmp_path):
        told = cli("--workspace", root, "run", "list", "--json", cwd=here)
        assert (told.code, len(told.json)) == (0, 1), told.err
    assert not (tmp_path / "my.db").exists()
    shutil.copytree(root, tmp_path / "copy")
    with Client(tmp_path / "copy") as copy:
        copy.runs.cancel(copy.runs.list()[0].id)
    with Client(root) as client:
        assert client.runs.list()[0].state == "queued"
