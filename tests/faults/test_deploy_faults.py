"""Evaluations and deployments that go wrong: never deployed by mistake, and old or new is served at every moment."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, states_of, wait_for
from tunesmith.core.errors import DataError, Refused

WATCHED = {"watch": {"for_s": 3600.0, "interval_s": 0.1, "max_failures": 3}}


def two_versions(fleet: Fleet) -> tuple[str, str]:
    """An adapter that was live, and a better one that is now; their digests."""
    for number, quality in enumerate((0.2, 0.5)):
        run_id = fleet.submit(f"trainer.options.quality={quality}", "watch.for_s=0", first=100 * number)
        fleet.work()
        assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason
    first, second = (fleet.client.adapters.show(f"{PROFILE}@v{version}").digest for version in (1, 2))
    assert fleet.served() == second
    return first, second


def current(fleet: Fleet) -> Path:
    return fleet.root / ".tunesmith" / "live" / PROFILE / "current"


def damage(fleet: Fleet, how: str) -> None:
    match how:
        case "link removed":
            current(fleet).unlink()
        case "bytes flipped":
            weights = current(fleet) / "adapter_model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        case "another version linked":
            current(fleet).unlink()
            current(fleet).symlink_to("versions/support@v1")


def test_target_damaged_in_the_watch_is_rolled_back_by_itself(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile=WATCHED)
    _, second = two_versions(fleet)
    fleet.start()
    for version, how in enumerate(("link removed", "bytes flipped", "another version linked"), start=3):
        run_id = fleet.submit("trainer.options.quality=0.9", first=100 * version)
        experience_id = fleet.an_experience(fleet.client.runs.get(run_id).dataset_id, how)
        fleet.wait(run_id, "watching")
        name = f"{PROFILE}@v{version}"
        assert fleet.served() == fleet.client.adapters.show(name).digest
        damage(fleet, how)
        fleet.wait(run_id, "rolled_back")
        wait_for(lambda: _serves(fleet, second), 10, "for the version before it to be served")
        assert "3 bad looks in a row" in fleet.client.runs.get(run_id).reason, how
        assert fleet.client.adapters.show(name).state == "rolled_back", how
        returned = fleet.experience(experience_id)
        assert (how, returned.state, returned.num_rejections) == (how, "collected", 1)
    live = fleet.client.adapters.live(PROFILE)
    assert live is not None
    assert live.digest == second


def _serves(fleet: Fleet, digest: str | None) -> bool:
    """Whether exactly this is served; a damaged copy is nothing."""
    try:
        return fleet.served() == digest
    except (OSError, DataError):
        return False


def test_trouble_that_passes_during_the_watch_is_forgiven(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"watch": {"for_s": 2.0, "interval_s": 0.3, "max_failures": 3}})
    run_id = fleet.submit()
    fleet.start()
    fleet.wait(run_id, "watching")
    aside = current(fleet).readlink()
    current(fleet).unlink()
    wait_for(lambda: _num_failures(fleet) == 1, 10, "for a bad look")
    current(fleet).symlink_to(aside)
    fleet.wait(run_id, "deployed")
    assert _num_failures(fleet) == 0


def _num_failures(fleet: Fleet) -> int:
    [watch] = [row for row in fleet.rows()["tasks"] if row["kind"] == "watch"]
    return int(watch["payload"].get("num_failures", 0))


@ON_SQLITE
def test_rollback_by_a_person_during_the_watch_ends_the_run(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, profile=WATCHED)
    _, second = two_versions(fleet)
    run_id = fleet.submit("trainer.options.quality=0.9", first=300)
    fleet.start()
    fleet.wait(run_id, "watching")
    assert fleet.client.adapters.rollback(PROFILE, reason="users complain") == f"{PROFILE}@v2"
    fleet.wait(run_id, "rolled_back")
    wait_for(lambda: _serves(fleet, second), 10, "for the version before it")
    rolled_back = fleet.client.adapters.show(f"{PROFILE}@v3")
    assert rolled_back.state == "rolled_back"
    with pytest.raises(Refused):
        fleet.client.adapters.approve(rolled_back.id)


def test_rollback_after_deployed_goes_back_one_version_then_to_the_base(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    first, _ = two_versions(fleet)
    newest = fleet.client.runs.list(profile=PROFILE)[0].id
    experience_id = fleet.an_experience(fleet.client.runs.get(newest).dataset_id)
    assert fleet.client.adapters.rollback(PROFILE) == f"{PROFILE}@v1"
    fleet.work()
    assert fleet.served() == first
    assert fleet.client.adapters.deployment(PROFILE).targets[0]["observed"] == f"{PROFILE}@v1"
    assert fleet.state(newest) == "rolled_back"
    assert fleet.experience(experience_id).state in ("collected", "reserved")
    assert fleet.client.adapters.rollback(PROFILE) is None
    fleet.work()
    assert fleet.served() is None
    with pytest.raises(Refused, match="nothing to roll back"):
        fleet.client.adapters.rollback(PROFILE)
    assert [adapter.state for adapter in fleet.client.adapters.list(PROFILE)] == ["rolled_back", "rolled_back"]


def test_rollback_gives_the_data_of_a_deployed_run_back(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    experience_id = fleet.an_experience(fleet.client.runs.get(run_id).dataset_id)
    fleet.work()
    assert fleet.experience(experience_id).state == "consumed"
    fleet.client.adapters.rollback(PROFILE)
    returned = fleet.experience(experience_id)
    assert (returned.state, returned.num_rejections) == ("collected", 1)


def test_rollback_that_a_target_refuses_is_told_and_tried_until_it_works(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    first, second = two_versions(fleet)
    link = current(fleet)
    served = link.resolve()
    link.unlink()
    link.mkdir()
    (link / "in the way").touch()
    assert fleet.client.adapters.rollback(PROFILE) == f"{PROFILE}@v1"
    worker = fleet.start()
    [item] = wait_for(lambda: fleet.client.system.inbox() or None, 10, "for the inbox to tell")
    assert (item.kind, item.profile) == ("target directory", PROFILE)
    assert "current" in item.reason
    wait_for(lambda: _num_rollbacks(fleet) >= 2, 15, "for it to be tried again")
    (link / "in the way").unlink()
    link.rmdir()
    link.symlink_to(served)
    assert fleet.served() == second
    wait_for(lambda: _serves(fleet, first), 20, "for the rollback to come through by itself")
    wait_for(lambda: fleet.client.system.inbox() == [], 10, "for the inbox to be empty")
    assert worker.poll() is None


def _num_rollbacks(fleet: Fleet) -> int:
    """How often the newest rollback was tried and failed."""
    rows = fleet.rows()
    [*_, task] = [row for row in rows["tasks"] if row["kind"] == "rollback"]
    return sum(1 for row in rows["attempts"] if row["task_id"] == task["id"] and row["state"] == "failed")


def test_same_bytes_trained_again_after_a_rollback_are_a_new_version(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    ids = []
    for _ in range(2):
        ids.append(fleet.submit())
        fleet.work()
        fleet.client.adapters.rollback(PROFILE) if len(ids) == 1 else None
    first, second = (fleet.client.adapters.show(f"{PROFILE}@v{version}") for version in (1, 2))
    assert first.digest == second.digest, "the drill is pointless unless they are alike"
    assert [fleet.state(run_id) for run_id in ids] == ["rolled_back", "deployed"]
    assert (first.state, second.state) == ("rolled_back", "live")
    assert current(fleet).resolve().name == f"{PROFILE}@v2"


def test_revoked_live_adapter_is_taken_out_of_service(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    first, second = two_versions(fleet)
    assert fleet.client.adapters.revoke(f"{PROFILE}@v2", "leaks a secret").state == "revoked"
    fleet.work()
    assert fleet.served() == first != second
    with pytest.raises(Refused):
        fleet.client.adapters.rollback(PROFILE, to=f"{PROFILE}@v2")
    assert fleet.client.adapters.revoke(f"{PROFILE}@v1", "this one too").state == "revoked"
    fleet.work()
    assert fleet.served() is None
    assert fleet.client.adapters.live(PROFILE) is None


def test_adapter_revoked_while_it_is_evaluated_never_goes_live(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train")
    assert fleet.state(run_id) == "evaluating"
    fleet.client.adapters.revoke(f"{PROFILE}@v1", "wrong data")
    fleet.work()
    assert fleet.state(run_id) not in ("deployed", "watching", "completed")
    assert (fleet.served(), fleet.client.adapters.live(PROFILE)) == (None, None)


@pytest.mark.parametrize("obstacle", ["a file", "a place that takes nothing"])
def test_target_that_cannot_load_holds_the_run_and_live_stays(make_fleet: MakeFleet, obstacle: str) -> None:
    fleet = make_fleet()
    good = fleet.submit()
    fleet.work()
    before = fleet.served()
    blocked = {"a file": "blocked", "a place that takes nothing": "/proc/self/nowhere"}[obstacle]
    (fleet.root / "blocked").write_text("in the way")
    targets = [{"name": "directory"}, {"name": "second", "options": {"path": blocked}}]
    a_profile(fleet.root, options={"quality": 0.9}, targets=targets)
    run_id = fleet.submit(first=100)
    fleet.work()
    run = fleet.client.runs.get(run_id)
    assert run.state == "held"
    assert "target second cannot load it" in run.reason
    assert fleet.served() == before
    live = fleet.client.adapters.live(PROFILE)
    assert live is not None
    assert live.run_id == good
    [item] = fleet.client.system.inbox()
    assert item.id == run_id

    a_profile(fleet.root, options={"quality": 0.9})
    (fleet.root / "blocked").unlink()
    if obstacle == "a file":  # repaired: a person lets it try again
        fleet.client.adapters.approve(f"{PROFILE}@v2")
        fleet.work()
        assert fleet.state(run_id) == "deployed"
        assert fleet.served() == fleet.served(folder=blocked) != before


def test_adapter_altered_between_verdict_and_flip_is_not_deployed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    assert fleet.state(run_id) == "deploying"
    weights = fleet.client.adapters.show(f"{PROFILE}@v1").path / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    fleet.work()
    run = fleet.client.runs.get(run_id)
    assert run.state == "held"
    assert "not what was evaluated" in run.reason
    assert (fleet.served(), fleet.client.adapters.live(PROFILE)) == (None, None)


# eval_script → (how the run ends, error class of the evaluation or None, what the reason says)
EVALUATIONS = {
    "crash": ("failed", "crash", "parked after 3 crashes"),
    "nan": ("rejected", None, "not a finite number"),
    "partial": ("failed", "mismatch", "cases"),
    "error": ("held", None, "scripted error"),
    "wrong_digest": ("failed", "mismatch", "subject_digests"),
}


def test_broken_evaluation_never_deploys(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    live = fleet.submit("trainer.options.quality=0.3")
    fleet.work()
    served = fleet.served()
    ids = {
        script: fleet.submit(f"trainer.options.eval_script={script}", "trainer.options.quality=0.9", first=100)
        for script in EVALUATIONS
    }
    fleet.work()
    for script, (state, error_class, word) in EVALUATIONS.items():
        run = fleet.client.runs.get(ids[script])
        assert (run.state, word in run.reason) == (state, True), (script, run.reason)
        assert {attempt.error_class for attempt in fleet.attempts(ids[script], "evaluate")} == {error_class}
        assert not {"deploying", "watching"} & set(states_of(fleet.client, ids[script]))
    assert fleet.served() == served
    now_live = fleet.client.adapters.live(PROFILE)
    assert now_live is not None
    assert now_live.run_id == live


def test_two_runs_on_one_profile_the_second_is_judged_again_by_what_is_live(
    make_fleet: MakeFleet, store: str | None
) -> None:
    """Both were better than the base; but when the second would go live, the first already is."""
    fleet = make_fleet(store=store, profile={"watch": {"for_s": 0.0}})
    better = fleet.submit("trainer.options.quality=0.8")
    worse = fleet.submit("trainer.options.quality=0.4")
    fleet.work()
    assert fleet.state(better) == "deployed"
    assert states_of(fleet.client, worse)[-3:] == ["deploying", "evaluating", "rejected"]
    assert len(fleet.attempts(worse, "evaluate")) == 2
    adapter = fleet.client.adapters.live(PROFILE)
    assert adapter is not None
    assert (adapter.run_id, fleet.served()) == (better, adapter.digest)


def test_two_runs_on_one_profile_the_better_second_goes_live_after_the_first(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"watch": {"for_s": 0.0}})
    first = fleet.submit("trainer.options.quality=0.4")
    second = fleet.submit("trainer.options.quality=0.8")
    workers = [fleet.start(until_idle=True) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0], fleet.logs()
    assert fleet.state(second) == "deployed"
    assert fleet.state(first) in ("deployed", "rejected")
    adapter = fleet.client.adapters.live(PROFILE)
    assert adapter is not None
    assert (adapter.run_id, fleet.served()) == (second, adapter.digest)


def test_nothing_is_flipped_while_a_watch_is_open(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"watch": {"for_s": 3600.0, "interval_s": 0.1}})
    watched = fleet.submit("trainer.options.quality=0.4")
    fleet.start()
    fleet.wait(watched, "watching")
    served = fleet.served()
    waiting = fleet.submit("trainer.options.quality=0.8", first=100)
    fleet.wait(waiting, "deploying")
    wait_for(lambda: "being watched" in (fleet.client.runs.get(waiting).waits_for or ""), 10)
    assert fleet.served() == served
    fleet.client.adapters.rollback(PROFILE)
    fleet.wait(watched, "rolled_back")
    fleet.wait(waiting, "watching", timeout_s=20)
    assert fleet.served() == fleet.client.adapters.show(f"{PROFILE}@v2").digest


KILLED_AT = ("rename,renameat,renameat2", "symlink,symlinkat", "fsync", "unlink,unlinkat", "pwrite64")


def a_deploying_run(fleet: Fleet) -> tuple[str, str]:
    """A live adapter, and a better one about to be deployed; the digests of both."""
    fleet.submit("trainer.options.quality=0.2")
    fleet.work()
    fleet.submit("trainer.options.quality=0.7", first=100)
    fleet.work("train", "evaluate")
    old, new = (fleet.client.adapters.show(f"{PROFILE}@v{version}").digest for version in (1, 2))
    assert fleet.served() == old != new
    return old, new


def strace_works() -> bool:
    try:
        return subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def deploy_and_be_killed(fleet: Fleet, calls: str, number: int) -> int:
    """A worker that is killed at its `number`-th system call of a kind; how it ended."""
    under = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}")
    inject = ("-e", f"inject={calls}:signal=SIGKILL:when={number}")
    return fleet.start("deploy", "watch", until_idle=True, under=(*under, *inject)).wait(60)


@pytest.mark.skipif(not strace_works(), reason="strace cannot trace here")
def test_worker_killed_at_steps_of_a_deployment_old_or_new_is_served(make_fleet: MakeFleet) -> None:
    """Two of the steps; all of them are a drill of `make soak`."""
    fleet = make_fleet()
    old, new = a_deploying_run(fleet)
    run_id = fleet.client.runs.list(profile=PROFILE)[0].id
    for calls in ("rename,renameat,renameat2", "symlink,symlinkat"):
        assert deploy_and_be_killed(fleet, calls, 1) == -signal.SIGKILL, fleet.logs()
        assert fleet.served() in (old, new), calls
    fleet.work()
    one_end(fleet, run_id, new)


@pytest.mark.soak
@pytest.mark.skipif(not strace_works(), reason="strace cannot trace here")
@pytest.mark.parametrize("calls", KILLED_AT)
def test_worker_killed_at_every_step_of_a_deployment_old_or_new_is_served(make_fleet: MakeFleet, calls: str) -> None:
    number, died = 0, -signal.SIGKILL
    while died == -signal.SIGKILL:
        number += 1
        fleet = make_fleet(f"kill-{number}", settings={"worker": {"lease_s": 1.0, "heartbeat_s": 0.2}})
        old, new = a_deploying_run(fleet)
        run_id = fleet.client.runs.list(profile=PROFILE)[0].id
        died = deploy_and_be_killed(fleet, calls, number)
        assert fleet.served() in (old, new), f"neither is served after a kill at {calls} {number}"
        fleet.work()
        one_end(fleet, run_id, new)
        fleet.end()
    print(f"{calls}: survived {number - 1} kills")
    assert died == 0


def one_end(fleet: Fleet, run_id: str, new: str) -> None:
    """The run ended properly: deployed, and exactly the new adapter is served."""
    assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason
    adapter = fleet.client.adapters.live(PROFILE)
    assert adapter is not None
    assert fleet.served() == adapter.digest == new
    assert fleet.client.adapters.deployment(PROFILE).targets[0]["observed"] == adapter.name
    left_over = [path.name for path in (fleet.root / ".tunesmith" / "live" / PROFILE / "versions").iterdir()]
    assert {name for name in left_over if not name.startswith(".")} == {f"{PROFILE}@v1", f"{PROFILE}@v2"}


def test_worker_killed_at_random_moments_of_many_deployments(make_fleet: MakeFleet) -> None:
    """Each run goes live, and at every moment one of its versions is served whole."""
    fleet = make_fleet(settings={"worker": {"lease_s": 0.6, "heartbeat_s": 0.15, "sweep_s": 0.1}})
    fleet.submit("trainer.options.quality=0.1")
    fleet.work()
    draw = random.Random(7)
    ids = []
    for number in range(3):
        ids.append(fleet.submit(f"trainer.options.quality={0.3 + 0.2 * number}", first=100 * (number + 1)))
        fleet.work("train", "evaluate")
        worker = fleet.start("deploy", "watch")
        wait_for(lambda: "worker_started" in fleet.log(len(fleet.processes) - 1).read_text())
        time.sleep(draw.uniform(0.0, 0.05))
        worker.kill()
        worker.wait()
        assert fleet.served() is not None
        fleet.work()
        assert fleet.state(ids[-1]) == "deployed", fleet.client.runs.get(ids[-1]).reason
        live = fleet.client.adapters.live(PROFILE)
        assert live is not None
        assert (live.run_id, fleet.served()) == (ids[-1], live.digest)


def test_reader_of_the_target_never_finds_nothing_while_versions_change(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.submit("trainer.options.quality=0.1")
    fleet.work()
    ids = [fleet.submit(f"trainer.options.quality={0.3 + 0.3 * n}", first=100 * (n + 1)) for n in range(3)]
    worker = fleet.start(until_idle=True)
    seen = set()
    while worker.poll() is None:
        seen.add(fleet.served())
        time.sleep(0.001)
    assert None not in seen
    known = {adapter.digest for adapter in fleet.client.adapters.list(PROFILE)}
    assert seen <= known
    assert len(seen) >= 3, "it was not looked at while it changed"
    assert {fleet.state(run_id) for run_id in ids} == {"deployed"}


def slow_links(seconds: float) -> tuple[str, ...]:
    """What makes a worker take so long for the step that moves a target's link."""
    calls = "symlink,symlinkat"
    delay = f"inject={calls}:delay_enter={int(seconds * 1e6)}:when=1"
    return ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", delay)


@pytest.mark.skipif(not strace_works(), reason="strace cannot trace here")
def test_worker_that_hangs_in_a_deployment_loses_it_and_cannot_spoil_it_later(make_fleet: MakeFleet) -> None:
    """It beats, but makes no progress: another takes over. When it goes on, it moves the link, and that is mended."""
    deadlines = dict.fromkeys(("load", "hash", "train", "validate", "save", "score", "generate"), 0.8)
    timing = {"lease_s": 1.0, "heartbeat_s": 0.2, "grace_s": 0.1, "phase_deadlines_s": deadlines}
    fleet = make_fleet(settings={"worker": timing}, profile=WATCHED)
    fleet.submit("watch.for_s=0", "trainer.options.quality=0.2")
    fleet.work()
    run_id = fleet.submit("trainer.options.quality=0.7", first=100)
    fleet.work("train", "evaluate")
    old, new = (fleet.client.adapters.show(f"{PROFILE}@v{version}").digest for version in (1, 2))
    fleet.start("deploy", under=slow_links(7.0))
    wait_for(lambda: fleet.client.adapters.show(f"{PROFILE}@v2").state == "live", 20, "for the flip")
    fleet.start()
    fleet.wait(run_id, "watching")
    assert [attempt.outcome for attempt in fleet.attempts(run_id, "deploy")] == ["lost", "succeeded"]
    assert "no_progress" in fleet.log(0).read_text()
    assert fleet.served() == new
    fleet.client.adapters.rollback(PROFILE)
    wait_for(lambda: fleet.served() == old, 10, "for the rollback")
    wait_for(lambda: "lease_lost" in fleet.log(0).read_text(), 20, "for the first worker to go on")
    wait_for(lambda: fleet.served() == old, 10, "for what it spoilt to be mended")
    time.sleep(0.5)  # and it stays so
    assert fleet.served() == old


@pytest.mark.skipif(not strace_works(), reason="strace cannot trace here")
def test_slow_rollback_does_not_undo_a_deployment_that_came_after_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(settings={"worker": {"lease_s": 5.0, "heartbeat_s": 0.5}})
    two_versions(fleet)
    fleet.client.adapters.rollback(PROFILE)
    slow = fleet.start("rollback", until_idle=True, under=slow_links(5.0))
    wait_for(lambda: "task_started" in fleet.log(0).read_text(), 20)
    run_id = fleet.submit("trainer.options.quality=0.9", first=300)
    fleet.work("train", "evaluate", "deploy", "watch")
    assert fleet.state(run_id) == "deployed"
    assert slow.poll() is None, "the drill is pointless: the rollback was over before"
    assert slow.wait(20) == 0, fleet.logs()
    assert fleet.served() == fleet.client.adapters.show(f"{PROFILE}@v3").digest
    assert fleet.client.adapters.deployment(PROFILE).targets[0]["observed"] == f"{PROFILE}@v3"
