"""Workers that die, freeze, are told to end, or lose their database; and runs that take workers down with them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from support.databases import Postgres
from support.fleet import ON_SQLITE, Fleet, MakeFleet, end_of_programs, freeze_program, programs_below
from support.workspaces import DRILL_WORKER, wait_for
from tunesmith.core.errors import StoreError
from tunesmith.runs.queries import queue, tasks
from tunesmith.runs.queries.leases import Lease
from tunesmith.runs.rules.task import backoff_s

LONG = {"steps": 60, "step_s": 0.005, "script": "slow", "fail_attempts": 1}
"""The first attempt takes six seconds, so that something can happen to it; the next one is quick."""
OFTEN = {"checkpoints": {"every_steps": 5}, "validation": {"every_steps": 20}}


def one_deployment(fleet: Fleet, run_id: str) -> None:
    """Exactly one adapter came of the run, it went live once, and it is what is served."""
    rows = fleet.rows()
    [adapter] = rows["adapters"]
    assert (adapter["run_id"], adapter["state"]) == (run_id, "live")
    flips = [event for event in rows["events"] if (event["entity"], event["action"]) == ("deployment", "wanted")]
    assert len(flips) == 1
    assert fleet.served() == adapter["digest"]
    assert len(fleet.adapter_folders()) == 1
    assert fleet.strays() == []


def counts(fleet: Fleet, run_id: str) -> list[tuple[str, int, int, int]]:
    """What each task of a run was charged: (kind, crashes, errors, shrinks)."""
    with fleet.database.read() as tx:
        of_run = queue.of_run(tx, run_id)
    return [(t.kind.value, t.counts.num_crashes, t.counts.num_errors, t.counts.num_shrinks) for t in of_run]


def kill_in_training(fleet: Fleet, step: int) -> float:
    """Kill the worker of a run at a step; another finishes. How long the run had nobody, backoff not counted."""
    run_id = fleet.submit()
    doomed = fleet.start()
    fleet.wait_for_step(run_id, step)
    fleet.start()
    wait_for(lambda: len(fleet.client.system.workers()) == 2)
    doomed.kill()
    killed_at = time.time()
    fleet.wait(run_id, "deployed")
    first, second = fleet.attempts(run_id)
    assert (first.outcome, second.outcome) == ("lost", "succeeded")
    assert first.worker_id != second.worker_id
    resumed = fleet.spec(run_id, second)["resume"]
    assert resumed["step"] >= step - 5
    assert fleet.steps(run_id, second)[0] == resumed["step"] + 1
    assert counts(fleet, run_id)[0] == ("train", 1, 0, 0)
    one_deployment(fleet, run_id)
    return second.started_at.timestamp() - killed_at - backoff_s(1)


def test_worker_killed_in_training_another_finishes(make_fleet: MakeFleet, store: str | None) -> None:
    orphaned_s = kill_in_training(make_fleet(store=store, options=LONG, profile=OFTEN), 7)
    assert orphaned_s < DRILL_WORKER["lease_s"] + DRILL_WORKER["sweep_s"] + 2.0


@pytest.mark.soak
def test_worker_killed_in_training_200_times_another_finishes(make_fleet: MakeFleet) -> None:
    draw, waits = random.Random(3), []
    for number in range(200):
        fleet = make_fleet(f"kill-{number}", options=LONG, profile=OFTEN)
        waits.append(kill_in_training(fleet, draw.randint(6, 20)))
        fleet.end()
    print(f"200 kills: no stray; taken over after {sorted(waits)[100]:.1f} s (median), {max(waits):.1f} s at most")
    assert max(waits) < DRILL_WORKER["lease_s"] + DRILL_WORKER["sweep_s"] + 2.0


def test_worker_killed_with_a_clinging_trainer_leaves_no_stray(make_fleet: MakeFleet) -> None:
    """The trainer ignores TERM, forks, and forks again into a session of its own."""
    fleet = make_fleet(options={"script": "cling", "fail_attempts": 1, "at_step": 2})
    run_id = fleet.submit()
    doomed = fleet.start()
    first = fleet.wait_for_step(run_id, 1)
    wait_for(lambda: len(fleet.strays()) >= 4)  # the shim, the trainer, a child, a grandchild
    doomed.kill()
    fleet.start()
    gone_at = end_of_programs(fleet, first.id)
    fleet.wait(run_id, "deployed")
    assert fleet.attempts(run_id)[1].started_at.timestamp() >= gone_at - 0.5
    one_deployment(fleet, run_id)


def test_worker_killed_in_evaluation_another_finishes(make_fleet: MakeFleet) -> None:
    """Whatever the worker is killed at: kill the first as soon as its evaluator runs."""
    fleet = make_fleet()
    run_id = fleet.submit(lines=2000)
    doomed = fleet.start()
    wait_for(lambda: fleet.state(run_id) == "evaluating" and fleet.attempts(run_id, "evaluate") != [])
    doomed.kill()
    fleet.start()
    fleet.wait(run_id, "deployed")
    assert [attempt.outcome for attempt in fleet.attempts(run_id)] == ["succeeded"]
    one_deployment(fleet, run_id)


def test_frozen_worker_that_wakes_changes_nothing(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, options=LONG, profile=OFTEN)
    run_id = fleet.submit()
    sleeper = fleet.start()
    first = fleet.wait_for_step(run_id, 7)
    fleet.freeze(sleeper)
    fleet.start()
    gone_at = end_of_programs(fleet, first.id)
    second = wait_for(lambda: next(iter(fleet.attempts(run_id)[1:]), None))
    assert gone_at < second.started_at.timestamp(), "two trainers overlapped"
    said = (fleet.folder(run_id, first) / "stderr.log").read_text()
    assert "no longer renews the keepalive" in said, "its trainer did not end itself"
    fleet.wait(run_id, "deployed")
    before = fleet.rows("workers")
    os.kill(sleeper.pid, signal.SIGCONT)
    wait_for(lambda: "lease_lost" in fleet.log(0).read_text(), 10, "for the sleeper to notice")
    time.sleep(3 * DRILL_WORKER["heartbeat_s"])  # nothing must happen, so there is no event to wait for
    assert fleet.rows("workers") == before
    assert sleeper.poll() is None, "it should go on with other work"
    one_deployment(fleet, run_id)


def test_frozen_transaction_delays_the_next_worker_by_seconds_only(make_fleet: MakeFleet, postgres_url: str) -> None:
    """A worker that freezes inside a transaction keeps its rows locked: the database must not wait for it for long."""
    fleet = make_fleet(store=postgres_url, options=LONG, profile=OFTEN)
    run_id = fleet.submit()
    doomed = fleet.start()
    fleet.wait_for_step(run_id, 7)
    doomed.kill()
    [leased] = [row for row in fleet.rows()["tasks"] if row["state"] == "leased"]
    frozen_one = fleet.database.write()
    tasks.require_lease(frozen_one.__enter__(), Lease(leased["id"], "", leased["lease_token"]))
    fleet.start()
    wait_for(lambda: len(fleet.attempts(run_id)) == 2, 20, "for another worker to take over")
    with pytest.raises(StoreError):
        frozen_one.__exit__(None, None, None)
    fleet.wait(run_id, "deployed")


def test_frozen_worker_and_trainer_are_ended_before_another_trains(make_fleet: MakeFleet) -> None:
    """As when a whole container is frozen: the trainer cannot end itself, so the next worker does it."""
    fleet = make_fleet(options=LONG, profile=OFTEN)
    run_id = fleet.submit()
    sleeper = fleet.start()
    first = fleet.wait_for_step(run_id, 7)
    fleet.freeze(sleeper)
    for pid, _ in programs_below(fleet.client.workspace.runs_dir):
        os.kill(pid, signal.SIGSTOP)
    steps = fleet.steps(run_id, first)
    fleet.start()
    fleet.wait(run_id, "deployed")
    os.kill(sleeper.pid, signal.SIGCONT)
    wait_for(lambda: "lease_lost" in fleet.log(0).read_text(), 10, "for the sleeper to notice")
    assert fleet.steps(run_id, first) == steps, "the frozen trainer went on"
    one_deployment(fleet, run_id)


def test_healthy_worker_keeps_a_run_of_many_leases(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        options={"steps": 60, "step_s": 0.1}, settings={"worker": {"lease_s": 0.8, "heartbeat_s": 0.1, "sweep_s": 0.1}}
    )
    run_id = fleet.submit()
    fleet.start()
    fleet.start()
    fleet.wait(run_id, "deployed")
    [attempt] = fleet.attempts(run_id)
    assert attempt.ended_at is not None
    assert (attempt.ended_at - attempt.started_at).total_seconds() > 7 * 0.8
    assert counts(fleet, run_id)[0] == ("train", 0, 0, 0)


def race(fleet: Fleet, num_runs: int) -> float:
    """Two workers and `num_runs` runs; how long they took."""
    ids = [fleet.submit(lines=30) for _ in range(num_runs)]
    begun = time.monotonic()
    workers = [fleet.start(until_idle=True) for _ in range(2)]
    assert [worker.wait(60 + num_runs) for worker in workers] == [0, 0], fleet.logs()[-3000:]
    took_s = time.monotonic() - begun
    rows = fleet.rows()
    assert {row["id"]: row["state"] for row in rows["runs"]} == dict.fromkeys(ids, "completed")
    trained = rows["adapters"]
    assert sorted(row["run_id"] for row in trained) == sorted(ids)
    assert sorted(row["version"] for row in trained) == list(range(1, num_runs + 1))
    assert len(rows["tasks"]) == len(rows["attempts"]) == 2 * num_runs
    assert {row["state"] for row in rows["attempts"]} == {"succeeded"}
    by_worker = {row["worker_id"] for row in rows["attempts"]}
    assert len(by_worker) == 2, "one of them did nothing"
    assert fleet.strays() == []
    return took_s


QUICK = {
    "options": {"steps": 1, "step_s": 0.0},
    "profile": {"deploy": {"when": "never"}, "gate": {"min_cases": 2}, "data": {"heldout_share": 0.3}},
    "settings": {"worker": {"lease_s": 10.0, "heartbeat_s": 2.0}},
}


def test_two_workers_race_each_run_is_done_once(make_fleet: MakeFleet, store: str | None) -> None:
    took_s = race(make_fleet(store=store, **QUICK), 12)
    assert took_s < 60


@pytest.mark.soak
def test_two_workers_race_for_200_runs(make_fleet: MakeFleet, store: str | None) -> None:
    took_s = race(make_fleet(store=store, **QUICK), 200)
    print(f"200 runs by two workers in {took_s:.1f} s")
    assert took_s < 300


@pytest.mark.real_programs  # the end of its log is read, and a forked one has a deep stack
def test_poison_runs_are_parked_and_others_go_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"deploy": {"when": "never"}})
    scripts = ("finish", "crash", "finish", "kill_self", "oom_exit", "finish", "raise")
    ids = [fleet.submit(f"trainer.options.script={script}") for script in scripts]
    recovers = fleet.submit("trainer.options.script=oom_exit", "trainer.options.oom_once=true")
    workers = [fleet.start(until_idle=True) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0], fleet.logs()[-3000:]

    states = dict(zip(scripts, [fleet.state(run_id) for run_id in ids], strict=True))
    assert states == {"finish": "completed", **dict.fromkeys(("crash", "kill_self", "oom_exit", "raise"), "failed")}
    outcomes = {script: fleet.attempts(run_id) for script, run_id in zip(scripts, ids, strict=True)}
    assert [attempt.error_class for attempt in outcomes["crash"]] == ["crash"] * 3
    assert [attempt.error_class for attempt in outcomes["kill_self"]] == ["crash"] * 3
    assert [attempt.error_class for attempt in outcomes["oom_exit"]] == ["oom"] * 2
    assert [attempt.error_class for attempt in outcomes["raise"]] == ["bug"]
    inbox = {item.id: item for item in fleet.client.system.inbox()}
    assert {item.kind for item in inbox.values()} == {"parked run", "failed run"}
    assert set(inbox) == {ids[1], ids[3], ids[4], ids[6]}
    assert inbox[ids[1]].kind == "parked run"
    assert "parked after 3 crashes" in inbox[ids[1]].reason
    assert "SIGSEGV" in inbox[ids[1]].log
    assert "Segmentation fault" in inbox[ids[1]].log, "the program's last words are not there"

    assert fleet.state(recovers) == "completed"
    first, second = fleet.attempts(recovers)
    assert (first.error_class, second.outcome) == ("oom", "succeeded")
    divisors = [fleet.spec(recovers, attempt)["micro_batch_divisor"] for attempt in (first, second)]
    assert divisors == [1, 2]
    assert fleet.strays() == []


PATIENT = {
    "options": LONG,
    "profile": {"checkpoints": {"every_steps": 1000}},
    "settings": {"worker": {"grace_s": 10.0}},
}
"""Nothing is saved but on TERM, and there is time enough to save it."""


def term_in_training(fleet: Fleet, step: int) -> None:
    """TERM to the worker of a run at a step; nothing is charged, nothing is lost, another resumes."""
    run_id = fleet.submit()
    first_worker = fleet.start()
    fleet.wait_for_step(run_id, step)
    first_worker.terminate()
    assert first_worker.wait(20) == 0, fleet.logs()
    assert fleet.state(run_id) == "queued"
    assert fleet.strays() == []
    assert fleet.client.system.workers() == []
    [first] = fleet.attempts(run_id)
    assert first.outcome == "interrupted"
    last_step = fleet.steps(run_id, first)[-1]
    fleet.work()
    assert fleet.state(run_id) == "deployed"
    second = fleet.attempts(run_id)[1]
    assert fleet.spec(run_id, second)["resume"]["step"] == last_step >= step
    assert fleet.steps(run_id, second) == list(range(last_step + 1, 61))
    assert counts(fleet, run_id)[0] == ("train", 0, 0, 0)
    one_deployment(fleet, run_id)


@ON_SQLITE
def test_term_in_training_checkpoints_and_another_resumes(make_fleet: MakeFleet, store: str | None) -> None:
    term_in_training(make_fleet(store=store, **PATIENT), 7)


@pytest.mark.soak
def test_term_at_100_random_steps_checkpoints_and_another_resumes(make_fleet: MakeFleet) -> None:
    draw = random.Random(4)
    for number in range(100):
        fleet = make_fleet(f"term-{number}", **PATIENT)
        term_in_training(fleet, draw.randint(1, 30))
        fleet.end()
    print("100 times TERM: no step lost, no crash counted, no stray")


def test_term_in_evaluation_gives_it_back_at_no_cost(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"eval_script": "wait"}, settings={"worker": {"grace_s": 0.2}})
    run_id = fleet.submit()
    fleet.work("train")
    worker = fleet.start()
    freeze_program(fleet)  # so that it is still there when TERM arrives
    worker.terminate()
    assert worker.wait(10) == 0, fleet.logs()
    assert fleet.state(run_id) == "evaluating"
    assert [attempt.outcome for attempt in fleet.attempts(run_id, "evaluate")] == ["interrupted"]
    assert fleet.strays() == []
    fleet.work()
    assert fleet.state(run_id) == "deployed"
    assert counts(fleet, run_id)[:2] == [("train", 0, 0, 0), ("evaluate", 0, 0, 0)]


def test_term_with_a_trainer_that_ignores_it_is_not_a_crash(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        options={"steps": 60, "step_s": 0.05, "script": "ignore_term", "at_step": 3, "fail_attempts": 1}, profile=OFTEN,
        settings={"worker": {"grace_s": 0.3}},
    )  # fmt: skip
    run_id = fleet.submit()
    worker = fleet.start()
    fleet.wait_for_step(run_id, 7)
    worker.terminate()
    assert worker.wait(10) == 0, fleet.logs()
    [first] = fleet.attempts(run_id)
    assert (fleet.state(run_id), first.outcome) == ("queued", "interrupted")
    assert fleet.strays() == []
    fleet.work()
    assert fleet.spec(run_id, fleet.attempts(run_id)[1])["resume"]["step"] >= 5
    assert counts(fleet, run_id)[0] == ("train", 0, 0, 0)
    assert fleet.state(run_id) == "deployed"


def test_second_term_ends_the_worker_now(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        options={"script": "cling", "at_step": 2, "fail_attempts": 1}, settings={"worker": {"grace_s": 30.0}}
    )
    run_id = fleet.submit()
    worker = fleet.start()
    first = fleet.wait_for_step(run_id, 1)
    worker.terminate()
    time.sleep(0.2)
    assert worker.poll() is None, "it should be waiting for its trainer"
    worker.terminate()
    assert worker.wait(2) == 128 + signal.SIGTERM
    end_of_programs(fleet, first.id)
    fleet.work()
    assert fleet.state(run_id) == "deployed"


def test_idle_worker_ends_on_term(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(settings={"worker": {"poll_s": 5.0}})
    worker = fleet.start()
    wait_for(lambda: len(fleet.client.system.workers()) == 1)
    worker.terminate()
    assert worker.wait(3) == 0
    assert fleet.client.system.workers() == []


@pytest.mark.real_programs  # the end of its log is read, and a forked one has a deep stack
def test_stalled_trainer_is_ended_retried_and_parked(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        options={"script": "stall", "at_step": 3},
        settings={"worker": {"phase_deadlines_s": {"train": 0.8}, "grace_s": 0.2}},
    )
    run_id = fleet.submit()
    other = fleet.submit("trainer.options.script=finish")
    fleet.work()
    attempts = fleet.attempts(run_id)
    assert [attempt.error_class for attempt in attempts] == ["stalled"] * 3
    assert "no progress" in (attempts[0].error or "")
    assert "time.sleep" in (attempts[0].error or "") or "_stall" in (attempts[0].error or ""), "no stacks were dumped"
    run = fleet.client.runs.get(run_id)
    assert run.state == "failed"
    assert "parked after 3 crashes" in run.reason
    [item] = fleet.client.system.inbox()
    assert item.id == run_id
    assert fleet.state(other) == "deployed"
    assert fleet.strays() == []


def stopped_while_chattering(fleet: Fleet, kind: str) -> float:
    """A program that says the same for ever is ended as stalled, and tried again; how long its first attempt took."""
    run_id = fleet.submit()
    fleet.start()
    fleet.wait(run_id, "deployed" if kind == "train" else "failed", timeout_s=60)
    first = fleet.attempts(run_id, kind)[0]
    assert (first.outcome, first.error_class) == ("failed", "stalled"), first
    assert "no progress for" in (first.error or "")
    assert fleet.strays() == []
    assert first.ended_at is not None
    return (first.ended_at - first.started_at).total_seconds()


CHATTERING = {
    "train": {"script": "chatter", "at_step": 3, "fail_attempts": 1},
    "evaluate": {"eval_script": "chatter"},
}
QUICK_DEADLINES = {"worker": {"phase_deadlines_s": {"train": 1.0, "score": 1.0, "save": 1.0}, "grace_s": 0.2}}


def test_chattering_trainer_is_noticed_by_its_missing_progress(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options=CHATTERING["train"], settings=QUICK_DEADLINES)
    assert stopped_while_chattering(fleet, "train") < 15.0


@pytest.mark.soak
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_chattering_program_drill(make_fleet: MakeFleet, store: str | None, kind: str, number: int) -> None:
    """Five times each, on both databases; an evaluator that hangs three times is parked and fails the run."""
    fleet = make_fleet(store=store, options=CHATTERING[kind], settings=QUICK_DEADLINES)
    took = stopped_while_chattering(fleet, kind)
    print(f"a chattering program ({kind}, {number}): ended after {took:.1f} s with a deadline of 1 s")


@pytest.mark.real_programs  # it must still run when the signal arrives
def test_frozen_trainer_is_noticed_by_its_missing_progress(make_fleet: MakeFleet) -> None:
    """The worker beats all the time, but a beat without progress is worth nothing."""
    fleet = make_fleet(
        options=LONG, profile=OFTEN, settings={"worker": {"phase_deadlines_s": {"train": 1.0}, "grace_s": 0.2}}
    )
    run_id = fleet.submit()
    fleet.start()
    fleet.wait_for_step(run_id, 7)
    freeze_program(fleet)
    fleet.wait(run_id, "deployed")
    first, second = fleet.attempts(run_id)
    assert (first.error_class, second.outcome) == ("stalled", "succeeded")
    assert fleet.spec(run_id, second)["resume"]["step"] >= 5


def test_database_that_drops_its_connections_does_not_end_a_run(
    make_fleet: MakeFleet, postgres: Postgres, postgres_url: str
) -> None:
    fleet = make_fleet(store=postgres_url, options=LONG, profile=OFTEN)
    run_id = fleet.submit()
    worker = fleet.start()
    num_cut = 0
    for step in (5, 20, 35, 50):
        fleet.wait_for_step(run_id, step)
        fleet.client.close()  # ours would only tell us that it was cut
        num_cut += postgres.terminate_backends(make_url(postgres_url).database or "")
    assert num_cut >= 2
    fleet.wait(run_id, "deployed")
    assert worker.poll() is None, fleet.logs()
    [attempt] = fleet.attempts(run_id)
    assert attempt.outcome == "succeeded"
    one_deployment(fleet, run_id)


def test_database_away_for_longer_than_a_beat_does_not_end_a_run(make_fleet: MakeFleet) -> None:
    """SQLite: another process holds the write lock for more than a heartbeat, but less than a lease."""
    fleet = make_fleet(options=LONG, profile=OFTEN)
    run_id = fleet.submit()
    fleet.start()
    fleet.wait_for_step(run_id, 7)
    with fleet.database.write():
        time.sleep(2.5 * DRILL_WORKER["heartbeat_s"])
    fleet.wait(run_id, "deployed")
    assert [attempt.outcome for attempt in fleet.attempts(run_id)] == ["succeeded"]


def test_end_that_the_store_refuses_fails_the_run_and_the_worker_lives(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    with fleet.database.write() as tx:
        trigger = "CREATE TRIGGER no_adapters BEFORE INSERT ON adapters BEGIN SELECT RAISE(ABORT, 'no room'); END"
        tx.conn.execute(text(trigger))
    run_id = fleet.submit()
    worker = fleet.start()
    fleet.wait(run_id, "failed")
    assert "no room" in fleet.client.runs.get(run_id).reason
    [attempt] = fleet.attempts(run_id)
    assert (attempt.outcome, attempt.error_class) == ("failed", "bug")
    assert worker.poll() is None


def test_programs_see_nothing_of_the_worker_s_keys(make_fleet: MakeFleet) -> None:
    """Neither the trainer nor its shim; but what worker.pass_environment names."""
    fleet = make_fleet(options=LONG, settings={"worker": {"pass_environment": ["WANTED"]}})
    run_id = fleet.submit()
    fleet.start(env={"OPENAI_API_KEY": "canary-1", "NVIDIA_API_KEY": "canary-2", "WANTED": "seen"})
    fleet.wait_for_step(run_id, 2)
    seen = [Path(f"/proc/{pid}/environ").read_bytes() for pid in fleet.strays()]
    assert len(seen) >= 2
    assert all(b"canary" not in environ and b"WANTED=seen" in environ for environ in seen)
