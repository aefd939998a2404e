"""Cancel in every phase of a run: who was told that it is asked to cancel sees it cancelled, and nothing goes live."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fleet import Fleet, MakeFleet, freeze_program
from support.workspaces import PROFILE, AnyProcess, wait_for
from tunesmith.core.errors import Refused

TARGET_PROGRAM = Path(__file__).parents[1] / "support" / "target_program.py"
ENDLESS = ("trainer.options.steps=100000", "trainer.options.step_s=0.02")
PATIENT = {"worker": {"lease_s": 20.0, "heartbeat_s": 0.4}}
"""A worker that is stopped for a moment keeps its task."""


@contextlib.contextmanager
def stopped(fleet: Fleet, worker: AnyProcess) -> Iterator[None]:
    fleet.freeze(worker)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def have_worker(fleet: Fleet, *kinds: str) -> None:
    """One for all rounds of a phase."""
    if not fleet.processes:
        fleet.start(*kinds)


def queued(fleet: Fleet, _number: int) -> str:
    return fleet.submit()


def loading(fleet: Fleet, _number: int) -> str:
    run_id = fleet.submit(*ENDLESS)
    have_worker(fleet)
    freeze_program(fleet)
    return run_id


def training(fleet: Fleet, number: int) -> str:
    run_id = fleet.submit(*ENDLESS)
    have_worker(fleet)
    fleet.wait_for_step(run_id, 1 + number)
    return run_id


def after_stop(fleet: Fleet, number: int) -> str:
    run_id = training(fleet, number)
    fleet.client.runs.stop(run_id)
    return run_id


def after_pause(fleet: Fleet, number: int) -> str:
    run_id = training(fleet, number)
    fleet.client.runs.pause(run_id)
    if number % 2:
        fleet.wait(run_id, "paused")
    return run_id


def evaluating(fleet: Fleet, _number: int) -> str:
    run_id = fleet.submit("trainer.options.eval_script=wait")
    fleet.work("train")
    have_worker(fleet, "evaluate")
    freeze_program(fleet)
    return run_id


def deploying(fleet: Fleet, number: int) -> str:
    """While the target is asked, before the flip; every third time it may not have begun."""
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    if number % 3 == 0:
        return run_id
    have_worker(fleet, "deploy", "watch")
    wait_for(lambda: fleet.attempts(run_id, "deploy") or None)
    time.sleep(0.05 * number)
    return run_id


def held(fleet: Fleet, _number: int) -> str:
    run_id = fleet.submit("deploy.when=approved")
    fleet.work()
    return run_id


def shadowing(fleet: Fleet, number: int) -> str:
    run_id = fleet.submit("shadow.enabled=true", "shadow.interval_s=0.05")
    have_worker(fleet)
    fleet.wait(run_id, "shadowing")
    time.sleep(0.03 * number)
    return run_id


def watching(fleet: Fleet, _number: int) -> str:
    run_id = fleet.submit("watch.for_s=3600", "watch.interval_s=0.1")
    have_worker(fleet)
    fleet.wait(run_id, "watching")
    return run_id


def any_moment(fleet: Fleet, number: int) -> str:
    run_id = fleet.submit("trainer.options.steps=3")
    have_worker(fleet)
    time.sleep(random.Random(number).uniform(0.5, 4.0))
    return run_id


PHASES: dict[str, tuple[Callable[[Fleet, int], str], str]] = {
    "queued": (queued, "cancelled"),
    "loading": (loading, "cancelled"),
    "training": (training, "cancelled"),
    "after stop": (after_stop, "cancelled"),
    "after pause": (after_pause, "cancelled"),
    "evaluating": (evaluating, "cancelled"),
    "deploying": (deploying, "cancelled or told"),
    "held": (held, "cancelled"),
    "shadowing": (shadowing, "cancelled"),
    "watching": (watching, "told"),
    "any moment": (any_moment, "cancelled or told"),
}


def a_fleet(make_fleet: MakeFleet, store: str | None) -> Fleet:
    """Its target takes its time: each verb starts a program."""
    program = [sys.executable, str(TARGET_PROGRAM), str(Path("state.json")), "honest"]
    target = {"name": "one", "kind": "command", "options": {"program": program}}
    return make_fleet(store=store, settings=PATIENT, profile={"targets": [target]})


def cancelled_in(fleet: Fleet, reach: Callable[[Fleet, int], str], number: int) -> str:
    """Reach a phase, ask to cancel, and see what was promised come true; what was promised."""
    run_id = reach(fleet, number)
    answer, too_late = None, ""
    try:
        answer = fleet.client.runs.cancel(run_id)
    except Refused as refusal:
        too_late = str(refusal)
    if answer is None:
        assert "adapter rollback" in too_late or "has ended" in too_late, too_late
        assert fleet.client.adapters.live(PROFILE) is not None, too_late
    else:
        assert answer.message.startswith(("asked its worker to cancel", "cancelled")), answer.message
        fleet.wait(run_id, "cancelled")
        assert all(request["acknowledged_at"] for request in fleet.client.runs.show(run_id).requests)
        assert fleet.client.adapters.live(PROFILE) is None
    if answer is None:
        end_of(fleet, run_id)
    return "told" if answer is None else "cancelled"


def end_of(fleet: Fleet, run_id: str) -> None:
    """Leave nothing live for the next one."""
    fleet.client.adapters.rollback(PROFILE)
    if fleet.client.runs.get(run_id).finished_at is None:
        have_worker(fleet)
    fleet.wait(run_id, "rolled_back")


@pytest.mark.parametrize("phase", ["after stop", "deploying", "watching"])
def test_cancel_comes_true_or_is_refused_in(make_fleet: MakeFleet, phase: str) -> None:
    reach, promise = PHASES[phase]
    assert cancelled_in(a_fleet(make_fleet, None), reach, 1) in promise


def test_cancel_while_the_result_is_saved_comes_true(make_fleet: MakeFleet) -> None:
    assert cancelled_while_saved(make_fleet(settings=PATIENT)) == "cancelled"


def cancelled_while_saved(fleet: Fleet) -> str:
    """The program has told its result, and its worker has not looked at it yet."""
    run_id = fleet.submit("trainer.options.steps=20", "trainer.options.step_s=0.02")
    worker = fleet.start()
    attempt = fleet.wait_for_step(run_id, 2)
    with stopped(fleet, worker):
        result = fleet.folder(run_id, attempt) / "result.json"
        wait_for(result.exists, 20, "for the result")
        assert fleet.client.runs.cancel(run_id).message == "asked its worker to cancel"
    state = fleet.wait(run_id, "cancelled")
    assert (fleet.served(), fleet.client.adapters.list()) == (None, [])
    worker.kill()
    worker.wait()
    return state


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
def test_cancel_in_each_phase_ten_times(make_fleet: MakeFleet, store: str | None, phase: str) -> None:
    reach, promise = PHASES[phase]
    fleet = a_fleet(make_fleet, store)
    outcomes = [cancelled_in(fleet, reach, number) for number in range(10)]
    sys.stderr.write(f"cancel {phase}: {count(outcomes)}\n")
    assert all(outcome in promise for outcome in outcomes), outcomes


@pytest.mark.real_programs  # it must still run when the signal arrives
@pytest.mark.soak
def test_cancel_while_the_result_is_saved_ten_times(make_fleet: MakeFleet, store: str | None) -> None:
    fleet = make_fleet(store=store, settings=PATIENT)
    outcomes = [cancelled_while_saved(fleet) for _ in range(10)]
    sys.stderr.write(f"cancel during the save: {count(outcomes)}\n")
    assert set(outcomes) == {"cancelled"}


def count(outcomes: list[str]) -> dict[str, Any]:
    return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
