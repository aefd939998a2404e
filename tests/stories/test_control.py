"""What people may wish, against a live worker: in every state it does what it should, or is refused with a reason."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.fleet import ON_POSTGRES, ON_SQLITE, Fleet, MakeFleet, freeze_program, programs_below
from support.workspaces import PROFILE, a_profile, states_of, wait_for
from tunesmith.client.views import RequestResult
from tunesmith.core.errors import Refused
from tunesmith.runs.queries import queue
from tunesmith.runs.rules.run import RunState

LONG = {"steps": 60, "step_s": 0.03}
ENDLESS = {"steps": 100_000, "step_s": 0.03}
RARE = {"checkpoints": {"every_steps": 100_000}, "validation": {"every_steps": 100_000}}


def request_of(fleet: Fleet, run_id: str, kind: str) -> dict[str, Any]:
    """The one request of that kind on a run."""
    [request] = [request for request in fleet.client.runs.show(run_id).requests if request["kind"] == kind]
    return request


def answered(fleet: Fleet, run_id: str, kind: str) -> str:
    """What the worker answered to a wish."""
    request = wait_for(lambda: (r := request_of(fleet, run_id, kind))["acknowledged_at"] and r, 10, f"for {kind}")
    assert request["actor"] == "user:test"
    return str(request["answer"])


def nothing_was_charged(fleet: Fleet, run_id: str) -> bool:
    with fleet.database.read() as tx:
        tasks = queue.of_run(tx, run_id)
    return all((t.counts.num_crashes, t.counts.num_errors, t.counts.num_shrinks) == (0, 0, 0) for t in tasks)


@ON_SQLITE
def test_pause_checkpoints_and_resume_goes_on_from_there(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, options=LONG, profile=RARE)
    run_id = fleet.submit()
    worker = fleet.start()
    fleet.wait_for_step(run_id, 8)
    answer = fleet.client.runs.pause(run_id)
    assert (answer.state, answer.message) == ("training", "asked its worker to pause")
    fleet.wait(run_id, "paused")
    assert answered(fleet, run_id, "pause") == "paused"
    [first] = fleet.attempts(run_id)
    assert first.outcome == "interrupted"
    last = fleet.steps(run_id, first)[-1]
    assert fleet.strays() == []

    other = fleet.submit("trainer.options.steps=1", first=1000)  # the worker was given back
    fleet.wait(other, "deployed")
    assert fleet.state(run_id) == "paused"
    assert fleet.client.runs.resume(run_id).state == "queued"
    assert fleet.wait(run_id) in ("deployed", "rejected")
    second = fleet.attempts(run_id)[1]
    assert fleet.spec(run_id, second)["resume"]["step"] == last
    assert fleet.steps(run_id, second) == list(range(last + 1, 61))
    assert nothing_was_charged(fleet, run_id)
    assert worker.poll() is None


def test_stop_goes_on_to_evaluation_with_the_best_so_far(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options=ENDLESS, profile={"validation": {"every_steps": 5}})
    run_id = fleet.submit()
    fleet.start()
    fleet.wait_for_step(run_id, 12)
    fleet.client.runs.stop(run_id)
    fleet.wait(run_id, "deployed")
    expected = ["queued", "training", "evaluating", "deploying", "watching", "deployed"]
    assert states_of(fleet.client, run_id) == expected
    assert answered(fleet, run_id, "stop") == "stopped early with the best so far"
    [attempt] = fleet.attempts(run_id)
    assert attempt.result is not None
    assert attempt.result["status"] == "stopped"
    assert attempt.result["best_step"] % 5 == 0
    assert attempt.result["num_steps"] >= 12
    assert fleet.served() is not None
    assert nothing_was_charged(fleet, run_id)


def test_stop_with_discard_ends_without_a_result(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options=ENDLESS)
    run_id = fleet.submit()
    fleet.start()
    fleet.wait_for_step(run_id, 5)
    fleet.client.runs.stop(run_id, discard=True)
    fleet.wait(run_id, "cancelled")
    assert answered(fleet, run_id, "cancel") == "the run is cancelled"
    assert fleet.client.adapters.list() == []
    assert fleet.adapter_folders() == []
    assert fleet.strays() == []


def test_checkpoint_on_request_is_written_and_training_goes_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options=ENDLESS, profile=RARE)
    run_id = fleet.submit()
    fleet.start()
    fleet.wait_for_step(run_id, 5)
    fleet.client.runs.checkpoint(run_id)
    assert answered(fleet, run_id, "checkpoint").startswith("at step")
    [checkpoint] = wait_for(lambda: fleet.rows()["checkpoints"] or None)
    fleet.wait_for_step(run_id, checkpoint["step"] + 5)
    assert fleet.state(run_id) == "training"


@pytest.mark.parametrize(
    ("wishes", "end"),
    [(("pause", "stop"), "deployed"), (("stop", "cancel"), "cancelled"), (("pause", "cancel"), "cancelled")],
    ids=["stop over pause", "cancel over stop", "cancel over pause"],
)
def test_stronger_wish_wins_when_both_are_open(make_fleet: MakeFleet, wishes: tuple[str, str], end: str) -> None:
    fleet = make_fleet(options=ENDLESS)
    run_id = fleet.submit()
    worker = fleet.start()
    fleet.wait_for_step(run_id, 5)
    fleet.freeze(worker)  # for less than a lease, so that it finds both at once
    for wish in wishes:
        getattr(fleet.client.runs, wish)(run_id)
    os.kill(worker.pid, signal.SIGCONT)
    fleet.wait(run_id, end)
    assert all(request["acknowledged_at"] for request in fleet.client.runs.show(run_id).requests)
    assert nothing_was_charged(fleet, run_id)


def test_same_wish_twice_is_one_request(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options=ENDLESS)
    run_id = fleet.submit()
    worker = fleet.start()
    fleet.wait_for_step(run_id, 2)
    fleet.freeze(worker)
    first, second = fleet.client.runs.pause(run_id), fleet.client.runs.pause(run_id)
    os.kill(worker.pid, signal.SIGCONT)
    assert first.request_id == second.request_id
    fleet.wait(run_id, "paused")


def test_pause_survives_the_death_of_the_worker_that_was_asked(make_fleet: MakeFleet) -> None:
    """The trainer has acknowledged, but nobody is left to settle it: whoever takes over does."""
    fleet = make_fleet(options=ENDLESS, profile={"checkpoints": {"every_steps": 5}})
    run_id = fleet.submit()
    worker = fleet.start()
    attempt = fleet.wait_for_step(run_id, 7)
    fleet.freeze(worker)
    fleet.client.runs.pause(run_id)
    # what the worker would pass on, and the trainer answers, before the worker dies
    request_id = request_of(fleet, run_id, "pause")["id"]
    with (fleet.folder(run_id, attempt) / "control.jsonl").open("a") as control:
        control.write(f'{{"id": "{request_id}", "kind": "pause"}}\n')
    wait_for(lambda: any(event["type"] == "ack" for event in fleet.program_events(run_id, attempt)))
    worker.kill()
    fleet.start()
    fleet.wait(run_id, "paused")
    assert answered(fleet, run_id, "pause") == "paused"


def test_acknowledgement_of_a_program_does_not_end_a_wish(make_fleet: MakeFleet) -> None:
    """A program that acknowledged a pause and died before it could end: the next attempt is paused, not trained on."""
    fleet = make_fleet(options=ENDLESS, profile={"checkpoints": {"every_steps": 5}})
    run_id = fleet.submit()
    worker = fleet.start()
    attempt = fleet.wait_for_step(run_id, 7)
    freeze_program(fleet)
    request_id = fleet.client.runs.pause(run_id).request_id
    with (fleet.folder(run_id, attempt) / "events.jsonl").open("a") as events:
        events.write(f'{{"v":1,"seq":1000000,"at":1.0,"type":"ack","request_id":"{request_id}","detail":"soon"}}\n')
    time.sleep(0.2)  # for the worker to read it; it shows no sign of that, which is the point
    for pid, _ in programs_below(fleet.client.workspace.runs_dir):
        os.kill(pid, signal.SIGKILL)
    fleet.wait(run_id, "paused")
    assert worker.poll() is None


@ON_POSTGRES
def test_estop_interrupts_training_and_lets_rollback_through(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, profile={**RARE, "watch": {"for_s": 0.0}}, settings={"worker": {"grace_s": 10.0}})
    first_live = fleet.submit("trainer.options.quality=0.2")
    fleet.work()
    second_live = fleet.submit("trainer.options.quality=0.5", first=100)
    fleet.work()
    assert [fleet.state(run_id) for run_id in (first_live, second_live)] == ["deployed", "deployed"]

    run_id = fleet.submit("trainer.options.steps=60", "trainer.options.step_s=0.03", "trainer.options.quality=0.9")
    worker = fleet.start()
    fleet.wait_for_step(run_id, 8)
    switch = fleet.client.system.estop(True, "smoke")
    assert (switch.is_on, switch.actor, switch.reason) == (True, "user:test", "smoke")
    fleet.wait(run_id, "queued")
    [attempt] = fleet.attempts(run_id)
    assert attempt.outcome == "interrupted"
    last = fleet.steps(run_id, attempt)[-1]
    assert fleet.strays() == []
    waits_for = fleet.client.runs.get(run_id).waits_for
    assert waits_for is not None
    assert "e-stop" in waits_for

    assert fleet.client.adapters.rollback(PROFILE) == f"{PROFILE}@v1"
    wanted = fleet.client.adapters.show(f"{PROFILE}@v1").digest
    wait_for(lambda: fleet.served() == wanted, 10, "for the rollback to reach the target")
    time.sleep(0.5)  # nothing must happen, so there is no event to wait for
    assert fleet.state(run_id) == "queued"
    assert len(fleet.attempts(run_id)) == 1

    fleet.client.system.estop(False)
    fleet.wait(run_id, "deployed")
    assert fleet.spec(run_id, fleet.attempts(run_id)[1])["resume"]["step"] == last
    assert nothing_was_charged(fleet, run_id)
    assert worker.poll() is None


def test_estop_keeps_a_promoted_adapter_from_going_live(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    assert fleet.state(run_id) == "deploying"
    fleet.client.system.estop(True)
    fleet.start()
    wait_for(lambda: len(fleet.client.system.workers()) == 1)
    time.sleep(0.5)  # nothing must happen, so there is no event to wait for
    assert (fleet.state(run_id), fleet.served()) == ("deploying", None)
    fleet.client.system.estop(False)
    fleet.wait(run_id, "deployed")


WISHES: dict[str, Callable[[Fleet, str], RequestResult]] = {
    "pause": lambda fleet, run_id: fleet.client.runs.pause(run_id),
    "stop": lambda fleet, run_id: fleet.client.runs.stop(run_id),
    "checkpoint": lambda fleet, run_id: fleet.client.runs.checkpoint(run_id),
    "skip": lambda fleet, run_id: fleet.client.runs.skip(run_id),
    "resume": lambda fleet, run_id: fleet.client.runs.resume(run_id),
    "cancel": lambda fleet, run_id: fleet.client.runs.cancel(run_id),
}
ALLOWED = {
    "queued": {"skip", "cancel"},
    "training": {"pause", "stop", "checkpoint", "cancel"},
    "paused": {"resume", "cancel"},
    "evaluating": {"cancel"},
    "held": {"cancel"},
    "deploying": {"cancel"},
    "watching": {"stop"},
    "deployed": set(),
    "validated": set(),
    "failed": set(),
    "skipped": set(),
}


def a_run_in_every_state(fleet: Fleet) -> dict[str, str]:
    """One run per state of ALLOWED, with a worker that trains one of them; each of a profile of its own."""

    def submit(state: str, *overrides: str, **wishes: Any) -> str:
        a_profile(fleet.root, state, options={"steps": 2, "step_s": 0.0}, deploy={"when": "promoted"})
        return fleet.submit(*overrides, profile=state, **wishes)

    ids = {
        "held": submit("held", "deploy.when=approved"),
        "watching": submit("watching", "watch.for_s=3600", "watch.interval_s=3600"),
        "deployed": submit("deployed"),
        "validated": submit("validated", dry_run=True),
        "failed": submit("failed", "trainer.options.script=raise"),
        "skipped": submit("skipped"),
    }
    fleet.client.runs.skip(ids["skipped"])
    worker = fleet.start()
    for state, run_id in ids.items():
        fleet.wait(run_id, state)
    worker.terminate()
    worker.wait()
    ids["deploying"] = submit("deploying")
    fleet.work("train", "evaluate")
    fleet.start("train")
    ids["evaluating"] = submit("evaluating")
    endless = ("trainer.options.steps=100000", "trainer.options.step_s=0.02")
    ids["paused"] = submit("paused", *endless)
    fleet.wait_for_step(ids["paused"], 1)
    fleet.client.runs.pause(ids["paused"])
    fleet.wait(ids["paused"], "paused")
    ids["training"] = submit("training", *endless)
    fleet.wait_for_step(ids["training"], 1)
    ids["queued"] = submit("queued")
    assert {state: fleet.state(run_id) for state, run_id in ids.items()} == {state: state for state in ids}
    assert set(ids) == set(ALLOWED)
    return ids


def test_wishes_are_refused_where_the_design_does_not_allow_them_and_cancel_works_where_it_does(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet()
    ids = a_run_in_every_state(fleet)
    before = {table: rows for table, rows in fleet.rows().items() if table in ("runs", "requests", "adapters")}
    for state, run_id in ids.items():
        for name, wish in WISHES.items():
            if name not in ALLOWED[state]:
                with pytest.raises(Refused, match=run_id):
                    wish(fleet, run_id)
    for state in ("queued", "held", "training", "paused", "watching"):
        other = {"queued": "resume", "held": "pause", "training": "skip", "paused": "stop", "watching": "cancel"}[state]
        with pytest.raises(Refused, match=r"`(run|adapter) "):  # it says what can be done instead
            WISHES[other](fleet, ids[state])
    assert {table: rows for table, rows in fleet.rows().items() if table in before} == before

    reserved = {
        state: fleet.an_experience(fleet.client.runs.get(ids[state]).dataset_id, state)
        for state, wishes in ALLOWED.items()
        if "cancel" in wishes
    }
    for state in reserved:
        answer = fleet.client.runs.cancel(ids[state])
        assert answer.state == ("training" if state == "training" else "cancelled"), state
    for state, experience_id in reserved.items():
        fleet.wait(ids[state], "cancelled")
        released = fleet.experience(experience_id)
        assert (released.state, released.num_rejections) == ("collected", 0), state
        assert nothing_was_charged(fleet, ids[state])
    assert [attempt.outcome for attempt in fleet.attempts(ids["training"])] == ["cancelled"]
    assert answered(fleet, ids["training"], "cancel") == "the run is cancelled"
    assert fleet.client.adapters.live("deploying") is None
    assert fleet.strays() == []
    with pytest.raises(Refused, match="run retry"):
        fleet.client.runs.cancel(ids["training"])


@pytest.mark.real_programs  # it must still run when the signal arrives
def test_cancel_while_an_evaluator_runs_ends_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"eval_script": "wait"})
    run_id = fleet.submit()
    fleet.work("train")
    fleet.start("evaluate")
    freeze_program(fleet)  # so that it is still there when the wish arrives
    assert fleet.client.runs.cancel(run_id).message == "asked its worker to cancel"
    fleet.wait(run_id, "cancelled")
    assert [attempt.outcome for attempt in fleet.attempts(run_id, "evaluate")] == ["cancelled"]
    assert fleet.strays() == []
    assert fleet.client.adapters.list()[0].state == "candidate"


def test_skipped_run_is_never_started(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    experience_id = fleet.an_experience(fleet.client.runs.get(run_id).dataset_id)
    assert fleet.client.runs.skip(run_id).state == "skipped"
    fleet.work()
    assert fleet.client.runs.show(run_id).attempts == ()
    assert states_of(fleet.client, run_id) == ["queued", "skipped"]
    assert fleet.experience(experience_id).state == "collected"


def test_priority_decides_who_goes_first(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(profile={"deploy": {"when": "never"}})
    low, normal, high = (fleet.submit(priority=priority) for priority in ("low", "normal", "high"))
    fleet.work()
    begun = {run_id: fleet.attempts(run_id)[0].started_at for run_id in (low, normal, high)}
    assert sorted(begun, key=begun.__getitem__) == [high, normal, low]
    assert {fleet.state(run_id) for run_id in begun} == {RunState.COMPLETED}
