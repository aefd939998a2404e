"""Cycles of the curriculum that are killed, frozen, told to end, stopped or raced: nothing half-made or overspent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from support.fleet import Fleet, MakeFleet
from support.teacher_server import Call, Teacher, a_teacher, better
from support.workspaces import PROFILE, cli_environ, wait_for
from tunesmith.client import Client
from tunesmith.curriculum.cycle import ABANDONED_AFTER
from tunesmith.curriculum.due import open_due
from tunesmith.curriculum.queries import spends
from tunesmith.curriculum.rules.cycle import cost_of, most_tokens
from tunesmith.curriculum.tables import spends as spends_table
from tunesmith.experience.rules.experience import CorrectionState
from tunesmith.profiles.resolve import resolve

NUM = 6
HONEST = 40


class Gate:
    """A teacher that answers well, but keeps one call waiting until it is told otherwise."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.is_reached, self.may_go = threading.Event(), threading.Event()
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> None:
        with self._lock:
            self.asked.append(call.question)
            number = len(self.asked)
        if number == self.at:
            self.is_reached.set()
            self.may_go.wait(30)
        better(call)


@contextmanager
def a_school(make_fleet: MakeFleet, store: str | None, play: Any, **policy: Any) -> Iterator[tuple[Fleet, Teacher]]:
    """A fleet whose profile has NUM entries that a teacher would answer better, and a curriculum at any time."""
    with a_teacher(play) as teacher:
        settings = {"base_url": teacher.url, "model": "big", "price_in": 1.0, "price_out": 2.0, "max_tokens": 64}
        curriculum = {"enabled": True, "min_entries": 2, "window": "00:00-24:00", "teacher": settings, **policy}
        profile = {"experience": {"verifiers": {"entity_preservation": {}}}, "curriculum": curriculum}
        fleet = make_fleet(store=store, profile=profile)
        add_entries(fleet.client, NUM)
        try:
            yield fleet, teacher
        finally:
            fleet.end()


def add_entries(client: Client, num: int, first: int = 10) -> None:
    for number in range(first, first + num):
        messages = [
            {"role": "user", "content": f"Send order {number} to Rome"},
            {"role": "assistant", "content": "It is done."},
        ]
        assert client.experiences.add(PROFILE, messages).class_name == "needs_improvement"


def check(fleet: Fleet, num_accepted: int) -> dict[str, Any]:
    """What must hold whatever happened; the rows, for more."""
    rows = fleet.rows()
    stored = rows["corrections"]
    accepted = [row for row in stored if row["state"] == CorrectionState.ACCEPTED]
    assert len(accepted) == len({row["experience_id"] for row in accepted}) == num_accepted
    assert all(row["answer"].startswith("Certainly: Send order") for row in accepted)
    paid_for = Counter(row["entity_id"] for row in rows["spends"])
    assert set(paid_for.values()) <= {1}, "nothing was paid twice"
    assert {row["id"].partition("-")[2] for row in stored} <= {row["id"].partition("-")[2] for row in rows["spends"]}
    assert {row["state"] for row in rows["experiences"]} <= {"collected", "forgotten"}
    assert rows["datasets"] == rows["runs"] == []
    return rows


def kill_in_call(make_fleet: MakeFleet, store: str | None, at: int) -> None:
    """Kill the worker while the teacher thinks about its n-th answer; another worker goes on."""
    gate = Gate(at)
    with a_school(make_fleet, store, gate) as (fleet, _):
        doomed = fleet.start()
        assert gate.is_reached.wait(30), fleet.logs()
        doomed.kill()
        doomed.wait()
        rows = check(fleet, at - 1)
        assert Counter(row["state"] for row in rows["spends"]) == Counter({"settled": at - 1, "reserved": 1})
        gate.may_go.set()
        fleet.start(until_idle=True).wait(60)
        rows = check(fleet, NUM - 1)
        (left,) = [row for row in rows["spends"] if row["state"] == "reserved"]
        assert left["amount"] > HONEST
        assert len(gate.asked) == len(set(gate.asked)) == NUM, "nobody was asked twice"
        (task,) = rows["tasks"]
        assert (task["state"], task["num_attempts"], task["num_crashes"]) == ("done", 2, 1)
        with fleet.database.write() as tx:
            before = spends.spent(tx, PROFILE, "curriculum", task["id"])
            tx.run(spends_table.update().values(created_at=tx.now - ABANDONED_AFTER * 2))
        fleet.work()
        with fleet.database.read() as tx:
            assert spends.spent(tx, PROFILE, "curriculum", task["id"]).cycle == before.cycle
        assert {row["state"] for row in fleet.rows()["spends"]} == {"settled"}


def test_worker_killed_in_a_call_leaves_a_reservation_and_another_goes_on(
    make_fleet: MakeFleet, store: str | None
) -> None:
    kill_in_call(make_fleet, store, 3)


@pytest.mark.soak
@pytest.mark.parametrize("at", range(1, NUM + 1))
@pytest.mark.parametrize("number", range(10))
def test_worker_killed_in_any_call_leaves_a_reservation(
    make_fleet: MakeFleet, store: str | None, at: int, number: int
) -> None:
    kill_in_call(make_fleet, store, at)


def test_foreground_killed_in_a_call_leaves_nothing_half_made(make_fleet: MakeFleet) -> None:
    gate = Gate(at=2)
    with a_school(make_fleet, None, gate) as (fleet, _):
        words = [sys.executable, "-m", "tunesmith.cli.main", "curriculum", "run", PROFILE, "--now"]
        process = subprocess.Popen(words, cwd=fleet.root, env=cli_environ(), stdout=subprocess.DEVNULL)
        assert gate.is_reached.wait(30)
        process.kill()
        process.wait()
        gate.may_go.set()
        rows = check(fleet, 1)
        assert Counter(row["state"] for row in rows["spends"]) == {"settled": 1, "reserved": 1}
        again = fleet.client.curriculum.run(PROFILE, now=True)
        assert again.counts["accepted"] == NUM - 2
        assert [outcome.decision for outcome in again.outcomes].count("skipped") == 1
        check(fleet, NUM - 1)


def test_worker_told_to_end_finishes_its_entry_and_gives_the_rest_back(make_fleet: MakeFleet) -> None:
    gate = Gate(at=2)
    with a_school(make_fleet, None, gate) as (fleet, _):
        worker = fleet.start()
        assert gate.is_reached.wait(30), fleet.logs()
        worker.terminate()
        gate.may_go.set()
        assert worker.wait(20) == 0
        rows = check(fleet, 2)
        assert (rows["tasks"][0]["state"], rows["tasks"][0]["num_crashes"]) == ("waiting", 0)
        fleet.work()
        rows = check(fleet, NUM)
        assert [row["state"] for row in rows["tasks"]] == ["done"]
        assert len(gate.asked) == NUM
        assert {row["amount"] for row in rows["spends"]} == {HONEST}


def test_worker_frozen_past_its_lease_writes_nothing_when_it_wakes(make_fleet: MakeFleet) -> None:
    gate = Gate(at=2)
    with a_school(make_fleet, None, gate) as (fleet, _):
        frozen = fleet.start()
        assert gate.is_reached.wait(30), fleet.logs()
        fleet.freeze(frozen)
        gate.may_go.set()
        fleet.start(until_idle=True).wait(60)
        check(fleet, NUM - 1)
        before = fleet.rows()["corrections"]
        os.kill(frozen.pid, signal.SIGCONT)
        wait_for(lambda: "lease_lost" in fleet.logs(), 20, "for the frozen one to notice")
        rows = check(fleet, NUM - 1)
        assert rows["corrections"] == before
        assert Counter(row["state"] for row in rows["spends"]) == {"settled": NUM - 1, "reserved": 1}


def test_estop_ends_a_cycle_between_two_entries_and_off_lets_it_go_on(make_fleet: MakeFleet) -> None:
    gate = Gate(at=2)
    with a_school(make_fleet, None, gate) as (fleet, _):
        worker = fleet.start()
        assert gate.is_reached.wait(30), fleet.logs()
        fleet.client.system.estop(True, "look into it")
        gate.may_go.set()
        wait_for(lambda: fleet.rows()["tasks"][0]["state"] == "waiting", 20)
        assert len(gate.asked) == 2
        check(fleet, 2)
        fleet.client.system.estop(False)
        wait_for(lambda: fleet.rows()["tasks"][0]["state"] == "done", 20)
        check(fleet, NUM)
        worker.terminate()
        worker.wait(20)


def test_many_workers_open_one_cycle(make_fleet: MakeFleet, store: str | None) -> None:
    with a_school(make_fleet, store, better) as (fleet, _):
        start = threading.Barrier(8)

        def look(number: int) -> list[str]:
            start.wait()
            return open_due(fleet.database, fleet.client.workspace, actor=f"wk-{number}")

        with ThreadPoolExecutor(8) as pool:
            opened = [task_id for found in pool.map(look, range(8)) for task_id in found]
        assert len(opened) == len(fleet.rows()["tasks"]) == 1
        fleet.work()
        check(fleet, NUM)
        add_entries(fleet.client, NUM, first=50)
        assert open_due(fleet.database, fleet.client.workspace, actor="wk-1") == [], "the cooldown holds"
        assert "24" in " ".join(fleet.client.curriculum.show(PROFILE).waits_for)


def test_cycles_at_once_ask_about_each_entry_once_and_stay_inside_the_budget(
    make_fleet: MakeFleet, store: str | None
) -> None:
    prompt = [{"role": "user", "content": "Send order 10 to Rome"}]

    def silent(call: Call) -> None:
        call.say(f"Certainly: {call.question}, as you wish.", usage=None)

    with a_school(make_fleet, store, silent) as (fleet, teacher):
        add_entries(fleet.client, 40, first=50)
        settings = resolve(PROFILE, workspace=fleet.client.workspace).profile.curriculum.teacher
        most = cost_of(most_tokens(prompt), 64, settings)
        budget = most * 10 / 1_000_000
        environ = {"TUNESMITH__CURRICULUM__BUDGET__PER_MONTH": str(budget)}
        clients = [Client(fleet.root, actor=f"user:{n}", environ=environ) for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            ended = list(pool.map(lambda client: client.curriculum.run(PROFILE, now=True), clients))
        for client in clients:
            client.close()
        assert ["out of money" in cycle.ended for cycle in ended] == [True] * 4, ended
        asked = Counter(call[2]["messages"][0]["content"] for call in teacher.calls)
        assert sum(asked.values()) == len(asked) == 10
        with fleet.database.read() as tx:
            assert spends.spent(tx, PROFILE, "curriculum", None).month == most * 10
        check(fleet, 10)


@pytest.mark.parametrize("what", ["forgotten", "corrected", "rated"])
def test_entry_that_people_move_while_the_teacher_answers_is_left_to_them(make_fleet: MakeFleet, what: str) -> None:
    gate = Gate(at=1)
    with a_school(make_fleet, None, gate, max_entries=1) as (fleet, _):
        due = fleet.client.curriculum.show(PROFILE).due[0].experience_id
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(fleet.client.curriculum.run, PROFILE, now=True)
            assert gate.is_reached.wait(30)
            with Client(fleet.root, actor="user:ann") as other:
                if what == "forgotten":
                    other.experiences.forget([due], reason="asked for")
                elif what == "corrected":
                    other.feedback.add(due, correction="Order 10 goes to Rome, at once.")
                else:
                    for rater in ("ann", "bob"):
                        other.feedback.add(due, "up", rater=rater)
            gate.may_go.set()
            (outcome,) = running.result(30).outcomes
        rows = check(fleet, 1 if what == "rated" else 0)
        assert outcome.cost == HONEST, "it was paid all the same"
        if what == "forgotten":
            assert (outcome.decision, rows["corrections"]) == ("skipped", [])
        elif what == "corrected":
            assert outcome.reason == "it was corrected or moved meanwhile"
