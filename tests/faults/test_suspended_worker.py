"""A worker that is suspended between the flip in the store and the one at the target: waking up, it moves nothing."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import drill_target
import pytest
from drill_target import DrillServer, serving

from support.candidates import a_candidate
from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, wait_for
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.directory import DirectoryTarget
from tunesmith.deployment.targets.flip_order import StaleFlip
from tunesmith.programs.shim import read_process

QUICK = {
    "worker": {"lease_s": 0.6, "heartbeat_s": 0.15, "sweep_s": 0.05, "poll_s": 0.02, "grace_s": 0.1, "targets_s": 0.2}
}
LOADED, LOAD, FLIP = 4, 5, 6
"""Numbers of the steps that follow the flip in the store: refusal, load and probe came before."""
FOLDER = [{"name": "one", "kind": "drill-directory"}]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    drill_target.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return tmp_path / "site"


def digest(fleet: Fleet, version: int) -> str:
    return fleet.client.adapters.show(f"{PROFILE}@v{version}").digest


def deployed(fleet: Fleet, targets: list[dict[str, Any]] = FOLDER) -> None:
    run_id = a_candidate(fleet.client, targets=targets).run_id
    assert run_id is not None
    fleet.work()
    assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason


def suspended(fleet: Fleet, site: Path, step: int, targets: list[dict[str, Any]] = FOLDER) -> subprocess.Popen[bytes]:
    """A worker that has flipped the next version in the store and stands in front of a step at the target."""
    a_candidate(fleet.client, targets=targets)
    env = {"PYTHONPATH": str(site), drill_target.STOP_AT: str(step)}
    worker = fleet.start("deploy", "watch", env=env)

    def is_stopped() -> bool:
        process = read_process(worker.pid)
        return process is not None and process.state == "T"

    wait_for(is_stopped, 30, f"for it to stand still: {fleet.logs()[-2000:]}")
    return worker


def wake(fleet: Fleet, worker: subprocess.Popen[bytes]) -> str:
    """Let it go on until it has noticed; what it wrote."""
    log = fleet.log(fleet.processes.index(worker))
    worker.send_signal(signal.SIGCONT)
    wait_for(lambda: "lease_lost" in log.read_text(), 20, "for the sleeper to notice")
    return log.read_text()


def nothing_is_moved_back(fleet: Fleet, site: Path, step: int, *, rolls_back: bool) -> None:
    """One drill: v2 is flipped in the store and its worker suspended; others bring v2 and then something else live."""
    deployed(fleet)
    first = len(fleet.client.adapters.list(PROFILE))
    worker = suspended(fleet, site, step)
    fleet.work()  # takes the task over, and v2 is served
    assert fleet.served() == digest(fleet, first + 1)
    if rolls_back:
        fleet.client.adapters.rollback(PROFILE)
        fleet.work()
        wanted = digest(fleet, first)
    else:
        deployed(fleet)
        wanted = digest(fleet, first + 2)
    assert fleet.served() == wanted
    told = wake(fleet, worker)
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        assert fleet.served() == wanted, f"woke in front of step {step} and moved it back"
        time.sleep(0.005)
    assert "nothing was changed" not in told
    assert "Traceback" not in told
    worker.kill()
    worker.wait()
    fleet.work()
    assert fleet.served() == wanted
    assert fleet.client.system.inbox() == []


@pytest.mark.parametrize("step", [LOAD, FLIP])
def test_worker_that_wakes_after_it_lost_its_task_does_not_move_the_target(
    make_fleet: MakeFleet, site: Path, store: str | None, step: int
) -> None:
    nothing_is_moved_back(make_fleet(store=store, settings=QUICK), site, step, rolls_back=step == FLIP)


@pytest.mark.soak
def test_suspended_twenty_times_between_store_and_target(make_fleet: MakeFleet, site: Path, store: str | None) -> None:
    draw, fleet = random.Random(12), make_fleet(store=store, settings=QUICK)
    for number in range(20):
        step = draw.choice((LOADED, LOAD, FLIP))
        nothing_is_moved_back(fleet, site, step, rolls_back=bool(draw.getrandbits(1)))
        print(f"{number + 1}: woke in front of step {step}, nothing moved")


def test_target_that_keeps_no_order_is_mended_and_the_log_says_what_was_done(make_fleet: MakeFleet, site: Path) -> None:
    """A server that takes every flip: the worker was suspended after it had asked whether the task is its own."""
    strict = DrillServer()
    with serving(strict) as url:
        targets = [{"name": "http", "kind": "drill-http", "options": {"url": url}}]
        fleet = make_fleet(settings=QUICK)
        deployed(fleet, targets)
        worker = suspended(fleet, site, FLIP, targets)
        fleet.work()
        deployed(fleet, targets)
        told = wake(fleet, worker)
        assert f"target http may have been flipped to {PROFILE}@v2: a task looks at it again" in told
        worker.kill()
        worker.wait()
        fleet.work()
        assert strict.live == digest(fleet, 3)


def test_directory_refuses_an_older_flip_and_takes_the_same_again(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    old, new = (a_candidate(fleet.client) for _ in range(2))
    one, two = (
        ServedAdapter(each.name, fleet.client.workspace.data_dir / each.path, each.digest) for each in (old, new)
    )
    target = DirectoryTarget({"path": "live"}, root=fleet.root, profile=PROFILE)
    target.flip_in_order(two, 20)
    target.flip_in_order(two, 20)
    for adapter in (one, None):
        with pytest.raises(StaleFlip, match="wanted since"):
            target.flip_in_order(adapter, 19)
    assert target.observe() == two.digest
    target.flip_in_order(one, 21)
    assert target.observe() == one.digest
    (fleet.root / "live" / ".tunesmith-target" / "order").write_text("what?")
    with pytest.raises(TargetError, match="remove it"):
        target.flip_in_order(two, 22)
    assert not list((fleet.root / "live").glob(".current.*")), os.listdir(fleet.root / "live")
