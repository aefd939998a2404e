"""A full disk below the workspace: runs wait at no cost, people are told, control works, and work goes on by itself."""

from __future__ import annotations

import pytest

from support.disks import MakeDisk, SmallDisk, make_disk, own_mounts
from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, cli, wait_for
from tunesmith.core.errors import StoreError
from tunesmith.runs.queries import queue

__all__ = ["make_disk", "own_mounts"]

SLOW = {"steps": 40, "step_s": 0.02}


def charged(fleet: Fleet, run_id: str) -> tuple[int, int]:
    with fleet.database.read() as tx:
        of_run = queue.of_run(tx, run_id)
    return sum(task.counts.num_crashes for task in of_run), sum(task.counts.num_errors for task in of_run)


def waits_for_room(fleet: Fleet, run_id: str, word: str) -> bool:
    return word in (fleet.client.runs.get(run_id).waits_for or "")


def survives(fleet: Fleet, disk: SmallDisk, *, inodes: bool, control: bool) -> None:
    """Fill the disk while a run trains and another waits; both end well once there is room, and nothing was charged."""
    word = "no inodes left under" if inodes else "no space left under"
    first, second = fleet.submit("checkpoints.every_steps=5"), fleet.submit(first=100)
    third = fleet.submit(first=200)
    fleet.start()
    fleet.wait_for_step(first, 6)
    if inodes:
        disk.use_up_inodes()
    else:
        disk.fill()
    wait_for(lambda: waits_for_room(fleet, first, word), 30, f"for {first} to wait: {fleet.logs()[-3000:]}")
    assert waits_for_room(fleet, second, word)
    if control:
        told(fleet, first, third, word)
    disk.make_room()
    for run_id in (first, second):
        fleet.wait(run_id, "deployed", "rejected", timeout_s=60)
        assert charged(fleet, run_id) == (0, 0)
    if control:
        assert fleet.state(third) == "cancelled"
    assert fleet.strays() == []


def told(fleet: Fleet, first: str, third: str, word: str) -> None:
    """While it is full: what people read, and that what they wish is done."""
    shown = cli("run", "show", first, cwd=fleet.root)
    assert shown.code == 0
    assert word in " ".join(shown.out.split())
    listed = cli("run", "list", cwd=fleet.root)
    assert listed.code == 0
    assert word[:15] in listed.out
    inbox = cli("inbox", cwd=fleet.root)
    assert inbox.code == 0
    assert word in " ".join(inbox.out.split())
    for words in (("estop", "on"), ("estop", "off"), ("run", "cancel", third)):
        done = cli(*words, cwd=fleet.root)
        assert done.code == 0, (words, done.err)


def test_full_disk_waits_at_no_cost_and_goes_on(make_disk: MakeDisk, make_fleet: MakeFleet) -> None:
    disk = make_disk("disk", megabytes=48, inodes=1500)
    survives(make_fleet("disk/one", options=SLOW), disk, inodes=False, control=True)


def test_directory_target_on_another_full_disk_waits_at_no_cost(make_disk: MakeDisk, make_fleet: MakeFleet) -> None:
    disk = make_disk("served", megabytes=1, inodes=100)
    target = {"name": "shared", "kind": "directory", "options": {"path": str(disk.path / "live")}}
    fleet = make_fleet(profile={"targets": [target]})
    run_id = fleet.submit()
    disk.fill()
    fleet.start()
    wait_for(lambda: "No space left" in (fleet.client.runs.get(run_id).waits_for or ""), 40, fleet.logs()[-2000:])
    [item] = [item for item in fleet.client.system.inbox() if item.id == run_id]
    assert item.kind == "deploy task without room"
    disk.make_room()
    fleet.wait(run_id, "deployed", timeout_s=60)
    assert charged(fleet, run_id) == (0, 0)


def test_bulk_is_refused_and_control_goes_on_where_the_store_s_disk_is_full(
    make_disk: MakeDisk, make_fleet: MakeFleet
) -> None:
    disk = make_disk("disk", megabytes=24)
    fleet = make_fleet("disk/one")
    client, hello = fleet.client, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    run_id = fleet.submit()
    disk.fill()
    with pytest.raises(StoreError, match="no space left under"):
        client.experiences.add(PROFILE, hello)
    for _ in range(20):
        client.system.estop(on=True, reason="a drill")
        client.system.estop(on=False, reason="a drill")
    client.runs.cancel(run_id)
    assert fleet.state(run_id) == "cancelled"
    disk.make_room()
    assert client.experiences.add(PROFILE, hello).is_new


@pytest.mark.soak
@pytest.mark.parametrize("number", range(15))
def test_full_disk_drill(
    make_disk: MakeDisk, make_fleet: MakeFleet, request: pytest.FixtureRequest, number: int
) -> None:
    """Ten times no space, five times no inodes; the store on the full disk and elsewhere by turns."""
    disk = make_disk("disk", megabytes=48, inodes=1500)
    store = request.getfixturevalue("postgres_url") if number % 2 else None
    survives(make_fleet("disk/one", store=store, options=SLOW), disk, inodes=number >= 10, control=True)
