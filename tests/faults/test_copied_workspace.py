"""A workspace that is copied or moved goes on where it is, with its own files, and leaves the original alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import tables
from support.databases import Postgres
from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_jsonl, a_workspace, cli, write_settings
from tunesmith.client import Client
from tunesmith.runs.queries import runs
from tunesmith.runs.spec_paths import with_absolute_paths

SLOW = ("trainer.options.steps=40", "trainer.options.step_s=0.1", "checkpoints.every_steps=2")


class Mover:
    """Copies and moves workspaces as an operator does, on one kind of store."""

    def __init__(self, make_fleet: MakeFleet, postgres: Postgres | None, url: str | None) -> None:
        self.original = make_fleet(store=url)
        self._postgres, self._url = postgres, url
        self._made: list[Fleet] = []

    def copied(self) -> Fleet:
        """The files at another place, with a store of their own: its file, or a copy of the database."""
        place = self.original.root.with_name("copy")
        with contextlib.suppress(shutil.Error):  # what a program removes meanwhile
            shutil.copytree(self.original.root, place, symlinks=True, ignore=shutil.ignore_patterns("store.db-*"))
        if self._postgres is not None and self._url is not None:
            write_settings(place, {"store": {"url": self._postgres.copy(self._url)}})
        else:
            data = Path(".tunesmith") / "store.db"
            source, sink = sqlite3.connect(self.original.root / data), sqlite3.connect(place / data)
            with contextlib.closing(source), contextlib.closing(sink):
                source.backup(sink)
        return self._fleet(place)

    def moved(self) -> Fleet:
        """The same files at another place; a server's store stays where it is."""
        self.original.client.close()
        return self._fleet(self.original.root.rename(self.original.root.with_name("moved")))

    def _fleet(self, place: Path) -> Fleet:
        self._made.append(Fleet(Client(place, actor="user:test")))
        return self._made[-1]

    def end(self) -> None:
        for fleet in self._made:
            fleet.end()


@pytest.fixture
def mover(make_fleet: MakeFleet) -> Iterator[Mover]:
    made = Mover(make_fleet, None, None)
    yield made
    made.end()


@pytest.fixture
def mover_on_postgres(make_fleet: MakeFleet, postgres: Postgres, postgres_url: str) -> Iterator[Mover]:
    made = Mover(make_fleet, postgres, postgres_url)
    yield made
    made.end()


def hide(fleet: Fleet) -> Path:
    """Out of sight: whatever still looks for the original finds nothing."""
    fleet.client.close()
    return fleet.root.rename(fleet.root.with_name("hidden"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def inside(fleet: Fleet, text: str) -> bool:
    return Path(text).is_relative_to(fleet.root)


def a_queued_run_goes_on_in_the_copy(mover: Mover) -> None:
    original = mover.original
    first = original.submit("trainer.options.quality=0.2")
    original.work()
    run_id = original.submit("trainer.options.quality=0.6", first=100)
    rows = original.rows()
    original.client.close()
    before = contents(original.root)
    copy = mover.copied()
    copy.work()
    assert [copy.state(each) for each in (first, run_id)] == ["deployed", "deployed"], copy.client.runs.get(
        run_id
    ).reason
    told = copy.spec(run_id, copy.attempts(run_id)[0])["run"]
    assert all(inside(copy, told[part]["path"]) for part in ("base", "dataset", "start"))
    assert copy.served() == copy.client.adapters.show(f"{PROFILE}@v2").digest
    assert contents(original.root) == before
    with Client(original.root, actor="user:test") as client:
        assert Fleet(client).rows() == rows


def a_paused_run_resumes_in_the_copy(mover: Mover) -> None:
    original = mover.original
    run_id = a_run_paused_in_training(original)
    before = contents(original.root)
    copy = mover.copied()
    hidden = hide(original)
    resumes_from_its_checkpoint(copy, run_id)
    after = contents(hidden)
    assert {name: after[name] for name in before if "store.db" not in name} == {
        name: content for name, content in before.items() if "store.db" not in name
    }


def a_copy_made_amid_training_leaves_the_original_alone(mover: Mover) -> None:
    original = mover.original
    run_id = original.submit(*SLOW)
    original.start()
    original.wait_for_step(run_id, 4)
    copy = mover.copied()
    copy.work()  # the lease in its store runs out; the trainer of the original is none of its business
    assert copy.state(run_id) == "deployed"
    original.wait(run_id, "deployed", timeout_s=60)
    assert len(original.attempts(run_id)) == 1, "the original was not disturbed"
    assert original.served() is not None


def a_moved_workspace_goes_on(mover: Mover) -> None:
    original = mover.original
    original.submit("trainer.options.quality=0.2")
    original.work()
    run_id = a_run_paused_in_training(original, "trainer.options.quality=0.6", first=100)
    moved = mover.moved()
    resumes_from_its_checkpoint(moved, run_id)
    assert moved.served() == moved.client.adapters.show(f"{PROFILE}@v2").digest
    assert moved.client.adapters.rollback(PROFILE) == f"{PROFILE}@v1"
    moved.work()
    assert moved.served() == moved.client.adapters.show(f"{PROFILE}@v1").digest
    assert [check for check in moved.client.system.doctor() if check.state == "broken"] == []


def a_run_paused_in_training(fleet: Fleet, *overrides: str, first: int = 0) -> str:
    run_id = fleet.submit(*SLOW, *overrides, first=first)
    worker = fleet.start()
    fleet.wait_for_step(run_id, 6)
    fleet.client.runs.pause(run_id)
    fleet.wait(run_id, "paused")
    worker.terminate()
    worker.wait()
    return run_id


def resumes_from_its_checkpoint(fleet: Fleet, run_id: str) -> None:
    fleet.client.runs.resume(run_id)
    fleet.work()
    assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason
    resumed = fleet.spec(run_id, fleet.attempts(run_id)[-1])["resume"]
    assert resumed["step"] >= 6
    assert inside(fleet, resumed["path"])


STORIES: list[Callable[[Mover], None]] = [
    a_queued_run_goes_on_in_the_copy,
    a_paused_run_resumes_in_the_copy,
    a_copy_made_amid_training_leaves_the_original_alone,
    a_moved_workspace_goes_on,
]


@pytest.mark.parametrize("story", STORIES)
def test_workspace_at_another_place(mover: Mover, story: Callable[[Mover], None]) -> None:
    story(mover)


def test_moved_workspace_on_postgres(mover_on_postgres: Mover) -> None:
    """It keeps its database; a copy has a copy of it, because two workspaces with one database are one."""
    a_moved_workspace_goes_on(mover_on_postgres)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("on", ["mover", "mover_on_postgres"])
def test_workspace_at_another_place_three_times(
    request: pytest.FixtureRequest, on: str, story: Callable[[Mover], None], number: int
) -> None:
    story(request.getfixturevalue(on))


def test_spec_of_an_older_tunesmith_with_absolute_paths_runs_in_the_copy(mover: Mover) -> None:
    original = mover.original
    run_id = original.submit()
    with original.database.write() as tx:
        spec = with_absolute_paths(original.client.workspace, runs.get(tx, run_id).spec).model_dump(mode="json")
        tx.run(tables.runs.update().where(tables.runs.c.id == run_id).values(spec=spec))
    assert spec["dataset"]["path"].startswith(str(original.root))
    original.client.close()
    copy = mover.copied()
    hide(original)
    copy.work()
    assert copy.state(run_id) == "deployed", copy.client.runs.get(run_id).reason
    told = copy.spec(run_id, copy.attempts(run_id)[0])["run"]
    assert all(inside(copy, told[part]["path"]) for part in ("base", "dataset"))


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


def test_servers_of_the_original_are_not_those_of_the_copy(mover: Mover) -> None:
    """Its file and its row are copied along, and its process lives: here, this one."""
    from tunesmith.deployment.serving_targets import serving_targets
    from tunesmith.deployment.targets.base import TargetError
    from tunesmith.deployment.targets.registry import make_target
    from tunesmith.programs.device.queries import servers
    from tunesmith.serving.gateway.server_lock import ServerLock

    original = mover.original
    lock = ServerLock(original.client.workspace)
    process = lock.publish("srv-1", "http://127.0.0.1:9", "token")
    from tunesmith.core.clock import utc_now
    from tunesmith.programs.device.rules import ServerState

    row = servers.Server("srv-1", os.uname().nodename, process, "http://127.0.0.1:9", "cpu", ServerState.SERVING, {},
                         {}, utc_now())  # fmt: skip
    with original.database.write() as tx:
        servers.register(tx, row, 60.0)
        assert [each.kind for each in serving_targets(tx, [{}], original.client.workspace)] == ["directory", "embedded"]
    copy = mover.copied()
    with copy.database.read() as tx:
        assert [each.kind for each in serving_targets(tx, [{}], copy.client.workspace)] == ["directory"]
    with pytest.raises(TargetError, match="no server of this workspace runs"):
        make_target("embedded", {}, root=copy.root, profile=PROFILE).observe()
    lock.release()


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
