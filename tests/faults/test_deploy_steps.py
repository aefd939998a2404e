"""Deployments step by step: killed in front of each, refused by a target, brought back where a target lost all."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drill_target
import pytest
import sqlalchemy as sa
from drill_target import DrillServer, serving

from support import tables
from support.candidates import a_candidate
from support.fleet import Fleet, MakeFleet
from support.rows import force
from support.store_processes import FORKED
from support.workspaces import PROFILE, a_profile
from tunesmith.client import Client
from tunesmith.orchestration import lifecycle
from tunesmith.runs.queries import tasks

QUICK = {"worker": {"lease_s": 30.0, "sweep_s": 0.05, "poll_s": 0.02, "targets_s": 0.05}}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the drill's targets are installed, for this process too."""
    drill_target.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return tmp_path / "site"


@pytest.fixture
def server() -> Iterator[tuple[DrillServer, str]]:
    one = DrillServer()
    with serving(one) as url:
        yield one, url


Targets = list[dict[str, Any]]


def http_target(url: str, name: str = "http") -> dict[str, Any]:
    return {"name": name, "kind": "drill-http", "options": {"url": url}}


def deployed(fleet: Fleet, targets: Targets, state: str = "deployed") -> str:
    """A run that was deployed; its id."""
    run_id = a_candidate(fleet.client, targets=targets).run_id
    assert run_id is not None
    fleet.work()
    assert fleet.state(run_id) == state, fleet.client.runs.get(run_id).reason
    return run_id


def digest(fleet: Fleet, version: int) -> str:
    return fleet.client.adapters.show(f"{PROFILE}@v{version}").digest


def work_and_be_killed(root: str, site: str, kill_at: int, log: str) -> None:
    """What a process of a drill does: a worker that dies in front of a step."""
    sys.path.insert(0, site)
    os.environ |= {drill_target.KILL_AT: str(kill_at), drill_target.STEPS: log}
    with Client(Path(root)) as client:
        client.system.worker(["deploy", "watch"]).run(until_idle=True)


def killed_at(fleet: Fleet, site: Path, number: int) -> list[str] | None:
    """The steps of a worker up to the one in front of which it was killed; None where it had no more to do."""
    log = fleet.root / f"steps-{number}"
    arguments = (str(fleet.root), str(site), number, str(log))
    process = FORKED.Process(target=work_and_be_killed, args=arguments, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return log.read_text().splitlines() if process.exitcode else None


def take_over(fleet: Fleet) -> None:
    """As if the lease of the dead had run out, and as if it were the first death: the drill has many."""
    with fleet.database.write() as tx:
        for row in tx.all(sa.select(tables.tasks.c.id).where(tables.tasks.c.state == "leased")):
            force(tx, tables.tasks, row["id"], lease_until=0.0)
        for claim in tasks.expired(tx):
            lifecycle.settle_lost(tx, claim, actor="drill")
            force(tx, tables.tasks, claim.task.id, num_crashes=0, available_at=None, available_clock=None)


@pytest.mark.parametrize("kind", [pytest.param("drill-directory", marks=pytest.mark.soak), "drill-http"])
def test_worker_killed_in_front_of_every_step_old_or_new_is_served_and_another_finishes(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str], kind: str
) -> None:
    strict, url = server
    options = {"url": url} if kind == "drill-http" else {}
    fleet = make_fleet(settings=QUICK)
    targets = [{"name": "one", "kind": kind, "options": options}]
    for _ in range(2):
        deployed(fleet, targets)
    run_id = a_candidate(fleet.client, targets=targets).run_id
    assert run_id is not None
    old, new = digest(fleet, 2), digest(fleet, 3)
    seen_from = len(strict.seen)

    def served() -> str | None:
        return strict.live if kind == "drill-http" else fleet.served()

    assert served() == old
    died_at: list[str] = []
    number, flipped = 0, False
    while (made := killed_at(fleet, site, number := number + 1)) is not None:
        died_at.append(made[-1])
        assert served() in (old, new), f"neither is served after a kill in front of {died_at}"
        take_over(fleet)
        if not flipped and fleet.client.adapters.show(f"{PROFILE}@v3").state == "live":
            number, flipped = 0, True  # from here on an attempt begins behind the flip in the store
    assert died_at[:4] == ["refusal", "load", "probe", "loaded"]
    assert died_at[4:12] == [
        "loaded", "load", "flip", "observe", "loaded", f"drain {PROFILE}@v1", f"unload {PROFILE}@v1",
        f"drain {PROFILE}@v2",
    ]  # fmt: skip
    assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason
    assert served() == new
    assert set(strict.seen[seen_from:]) <= {old, new}, "somebody would have been answered by neither"
    if kind == "drill-http":
        assert set(strict.held) == {f"{PROFILE}@v2", f"{PROFILE}@v3"}, "N−1 stays, what is older is let go"
    print(f"{kind}: killed in front of each of {len(died_at)} steps")


def test_steps_of_a_deployment_are_told_in_order(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [http_target(url)]
    deployed(fleet, targets)
    deployed(fleet, targets)
    strict.calls.clear()
    deployed(fleet, targets)
    new, old, older = (f"{PROFILE}@v{version}" for version in (3, 2, 1))
    in_order = [call for call in strict.calls if call != "state"]
    assert in_order[:6] == [f"refusal {new}", f"load {new}", f"probe {new}", f"load {new}", f"flip {new}",
                            f"drain {older}"], in_order  # fmt: skip
    assert in_order[6:8] == [f"unload {older}", f"drain {old}"]
    run = fleet.client.runs.list(profile=PROFILE)[0].id
    [attempt] = [row for row in fleet.rows()["attempts"] if (row["result"] or {}).get("parity")][-1:]
    told = attempt["result"]["parity"]["http"]
    assert (told["asked"], told["num_prompts"], told["max_difference"], told["tolerance"]) == (True, 2, 0.0, 0.15)
    assert fleet.state(run) == "deployed"


def test_target_that_answers_otherwise_is_refused_before_the_flip_and_holds_nothing(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    """As a server with other weights would; also the directory that had taken it lets it go again."""
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [{"name": "folder"}, http_target(url)]
    deployed(fleet, targets)
    strict.answers_as = "0" * 64
    run_id = deployed(fleet, targets, state="held")
    reason = fleet.client.runs.get(run_id).reason
    assert reason.startswith("target http does not answer as it was trained: prompt 1 of 2: another answer"), reason
    assert strict.live == digest(fleet, 1) == fleet.served()
    assert set(strict.held) == {f"{PROFILE}@v1"}
    assert not (fleet.root / ".tunesmith" / "live" / PROFILE / "versions" / f"{PROFILE}@v2").exists()
    strict.answers_as = None
    fleet.client.adapters.approve(f"{PROFILE}@v2")
    fleet.work()
    assert (fleet.state(run_id), strict.live) == ("deployed", digest(fleet, 2))


def test_candidate_without_references_is_refused_by_a_target_that_can_be_asked(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [http_target(url)]
    a_profile(fleet.root, targets=targets)
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    [references] = fleet.client.workspace.runs_dir.glob(f"{run_id}/*/references.json")
    references.write_text(references.read_text() + " ")  # not what was evaluated any more
    fleet.work()
    assert fleet.state(run_id) == "held"
    assert "evaluate it again" in fleet.client.runs.get(run_id).reason
    assert strict.held == {}
    fleet.client.adapters.evaluate(f"{PROFILE}@v1")
    fleet.work()
    assert (fleet.state(run_id), strict.live) == ("deployed", digest(fleet, 1))


def test_target_that_cannot_be_asked_now_is_tried_again_and_one_that_refuses_is_not(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [http_target(url), http_target("http://127.0.0.1:9", "down")]
    run_id = a_candidate(fleet.client, targets=targets).run_id
    assert run_id is not None
    with fleet.database.write() as tx:  # the pauses between three errors are seconds long
        tx.run(tables.tasks.update().where(tables.tasks.c.run_id == run_id).values(num_errors=2))
    fleet.work()
    tried = fleet.attempts(run_id, "deploy")
    assert [attempt.error_class for attempt in tried] == ["transient"]
    assert "target down: cannot be reached" in (tried[0].error or "")
    assert (fleet.state(run_id), strict.live) == ("held", None)
    strict.refuses = "the rank is too high"
    fleet.client.adapters.approve(f"{PROFILE}@v1")
    fleet.work()
    assert len(fleet.attempts(run_id, "deploy")) == 2
    assert "target http cannot load it: the rank is too high" in fleet.client.runs.get(run_id).reason


def rollbacks(fleet: Fleet, *states: str) -> list[dict[str, Any]]:
    rows = [row for row in fleet.rows()["tasks"] if row["kind"] == "rollback"]
    return [row for row in rows if not states or row["state"] in states]


def test_target_that_lost_its_adapters_is_brought_back_within_one_look(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [http_target(url)]
    deployed(fleet, targets)
    deployed(fleet, targets)
    strict.restart()
    fleet.work()
    assert strict.live == digest(fleet, 2)
    assert len(rollbacks(fleet)) == 1
    [seen] = fleet.client.adapters.deployment(PROFILE).targets
    assert (seen["wanted"], seen["observed"], seen["error"]) == (f"{PROFILE}@v2", f"{PROFILE}@v2", None)
    calls = len(strict.calls)
    fleet.work()
    assert set(strict.calls[calls:]) == {"state"}, "a target that is well is only looked at"


def test_target_restarted_with_other_weights_is_not_brought_back_silently(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [http_target(url)]
    deployed(fleet, targets)
    strict.restart()
    strict.answers_as = "0" * 64
    fleet.work()
    assert strict.live is None
    [item] = fleet.client.system.inbox()
    assert "answers otherwise than it did when it was evaluated" in item.reason
    strict.answers_as = None
    strict.restart()
    fleet.work()
    assert strict.live == digest(fleet, 1)
    assert fleet.client.system.inbox() == []


def test_target_that_stays_down_has_one_task_that_pauses_and_is_shown(make_fleet: MakeFleet, site: Path) -> None:
    strict = DrillServer()
    with serving(strict) as url:
        fleet, targets = make_fleet(settings=QUICK), [http_target(url)]
        deployed(fleet, targets)
    for _ in range(4):
        fleet.work()
    [task] = rollbacks(fleet)
    assert (task["state"], task["available_at"] is not None) == ("waiting", True)
    [item] = fleet.client.system.inbox()
    assert (item.kind, "cannot be reached" in item.reason) == ("target http", True)
    [check] = [check for check in fleet.client.system.doctor() if check.name.startswith("target")]
    assert (check.name, check.state) == (f"target http of {PROFILE}", "warning")
    [seen] = fleet.client.adapters.show(f"{PROFILE}@v1").targets
    assert (seen["observed"], "cannot be reached" in seen["error"]) == (f"{PROFILE}@v1", True), "as it was last seen"


def test_revoked_version_is_unloaded_from_every_target(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [{"name": "folder"}, http_target(url)]
    deployed(fleet, targets)
    deployed(fleet, targets)
    assert set(strict.held) == {f"{PROFILE}@v1", f"{PROFILE}@v2"}
    strict.busy = {f"{PROFILE}@v1"}  # even while somebody is still answered by it
    fleet.client.adapters.revoke(f"{PROFILE}@v1", "leaks a secret")
    fleet.work()
    versions = fleet.root / ".tunesmith" / "live" / PROFILE / "versions"
    assert (set(strict.held), {path.name for path in versions.iterdir()}) == (
        {f"{PROFILE}@v2"},
        {f"{PROFILE}@v2"},
    )
    assert strict.live == digest(fleet, 2) == fleet.served()


def test_version_that_still_answers_is_not_unloaded_and_spoils_nothing(
    make_fleet: MakeFleet, site: Path, server: tuple[DrillServer, str]
) -> None:
    strict, url = server
    fleet, targets = make_fleet(settings=QUICK), [http_target(url)]
    strict.busy = {f"{PROFILE}@v1"}
    for _ in range(3):
        deployed(fleet, targets)
    assert set(strict.held) == {f"{PROFILE}@v{version}" for version in (1, 2, 3)}
    strict.busy = set()
    deployed(fleet, targets)
    assert set(strict.held) == {f"{PROFILE}@v3", f"{PROFILE}@v4"}


def test_roll_back_by_a_person_is_not_undone_by_the_next_worker(make_fleet: MakeFleet, site: Path) -> None:
    """A version is deployed again and the worker dies between the flip of the store and that of the target."""
    targets = [{"name": "one", "kind": "drill-directory", "options": {}}]
    fleet = make_fleet(settings=QUICK, profile={"targets": targets})
    fleet.submit()
    fleet.work()
    fleet.client.adapters.rollback(PROFILE)
    fleet.work()
    run_id = fleet.client.adapters.deploy(f"{PROFILE}@v1", force=True, reason="again").id
    number = 3
    while fleet.client.adapters.live(PROFILE) is None:
        assert killed_at(fleet, site, number := number + 1) is not None
        take_over(fleet)
    assert fleet.state(run_id) == "deploying"
    fleet.client.adapters.rollback(PROFILE, reason="enough")
    fleet.work()
    assert (fleet.state(run_id), fleet.served()) == ("rolled_back", None)
    assert fleet.client.adapters.live(PROFILE) is None
