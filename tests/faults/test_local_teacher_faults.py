"""Cycles of a local teacher whose program or owner is killed, told to end or stopped: nothing half-made is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.fleet import Fleet, MakeFleet
from support.local_teachers import an_endless_school
from support.workspaces import PROFILE, cli_environ, wait_for
from tunesmith.curriculum.cycle_config import remove_left_behind
from tunesmith.experience.tables import corrections
from tunesmith.programs.shim import all_processes, read_process

pytestmark = pytest.mark.extra  # every test starts a program that loads a model: minutes in all

NUM = 24


def program_of(fleet: Fleet) -> int:
    """The pid of the program that answers for the teacher of this workspace; 0: there is none."""
    for process in all_processes():
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"tunesmith.curriculum.teachers.main" in words
            and b"-m" in words[:4]
            and os.fsencode(fleet.root) in b"".join(words)
        ):
            return process.pid
    return 0


def wait_for_answers(fleet: Fleet, num: int) -> int:
    """Until so many answers were judged; the pid of the program, which is at work on others."""

    def are_there() -> bool:
        with fleet.database.read() as tx:
            return len(tx.all(sa.select(corrections.c.id))) >= num

    wait_for(are_there, 60, fleet.logs()[-2000:])
    return program_of(fleet)


def is_gone(pid: int) -> Callable[[], bool]:
    def look() -> bool:
        process = read_process(pid)
        return process is None or process.state == "Z"

    return look


def check(fleet: Fleet) -> Counter[str]:
    """What must hold whatever happened; the states of the spends."""
    rows = fleet.rows()
    assert {row["state"] for row in rows["corrections"]} <= {"refused", "failed"}
    assert all("cut off" in row["reason"] for row in rows["corrections"] if row["state"] == "refused")
    assert all(row["counts"] == (row["state"] == "refused") for row in rows["corrections"])
    assert {row["amount"] for row in rows["spends"]} == {0}
    assert set(Counter(row["experience_id"] for row in rows["corrections"]).values()) <= {1}
    return Counter(row["state"] for row in rows["spends"])


def texts_left(fleet: Fleet) -> list[str]:
    """Files of cycles in which there are words of people or of teachers."""
    folder = fleet.root / ".tunesmith" / "teaching"
    return [path.name for path in folder.rglob("*.jsonl") if path.name in ("prompts.jsonl", "answers.jsonl")]


def test_program_killed_in_the_middle_ends_the_cycle_and_no_entry_pays_for_it(make_fleet: MakeFleet) -> None:
    with an_endless_school(make_fleet, NUM) as fleet:
        worker = fleet.start(until_idle=True)
        os.kill(wait_for_answers(fleet, 3), signal.SIGKILL)
        assert worker.wait(30) == 0
        rows = fleet.rows()
        decided = Counter(row["state"] for row in rows["corrections"])
        assert decided["failed"] == 2
        assert 3 <= decided["refused"] < NUM - 2
        assert check(fleet) == {"settled": decided.total()}
        assert [task["state"] for task in rows["tasks"]] == ["done"]
        told = fleet.client.curriculum.show(PROFILE).last_summary
        assert f"{decided['refused']} refused, 2 failed; spent 0.00; the teacher is down" in told
        assert "killed by signal 9" in told
        assert list((fleet.root / ".tunesmith" / "teaching").iterdir()) == []


def test_command_killed_in_the_middle_takes_its_program_and_all_texts_along(make_fleet: MakeFleet) -> None:
    with an_endless_school(make_fleet, NUM, enabled=False) as fleet:
        words = [sys.executable, "-m", "tunesmith.cli.main", "curriculum", "run", PROFILE, "--now"]
        command = subprocess.Popen(words, cwd=fleet.root, env=cli_environ(), stdout=subprocess.DEVNULL)
        program = wait_for_answers(fleet, 3)
        command.kill()
        command.wait()
        wait_for(is_gone(program), 10)
        assert check(fleet)["reserved"] <= 1, "what was being asked counts as asked"
        assert texts_left(fleet) == []
        (left,) = (fleet.root / ".tunesmith" / "teaching").iterdir()
        (left / "prompts.jsonl").write_text("as if the program had been killed, too")
        remove_left_behind(fleet.client.workspace)
        assert not left.exists()


@pytest.mark.parametrize(
    "how", ["term", pytest.param("estop", marks=pytest.mark.soak), pytest.param("lease", marks=pytest.mark.soak)]
)
def test_worker_that_must_end_ends_the_program_at_once_and_gives_the_entry_back(
    make_fleet: MakeFleet, how: str
) -> None:
    with an_endless_school(make_fleet, NUM) as fleet:
        worker = fleet.start()
        program = wait_for_answers(fleet, 3)
        if how == "term":
            worker.terminate()
            assert worker.wait(20) == 0
        elif how == "estop":
            fleet.client.system.estop(True, "look into it")
        else:
            fleet.freeze(worker)
        wait_for(is_gone(program), 20)
        if how == "lease":
            os.kill(worker.pid, signal.SIGCONT)
            wait_for(lambda: "lease_lost" in fleet.logs() or fleet.rows()["tasks"][0]["state"] != "leased", 20)
        else:
            wait_for(lambda: fleet.rows()["tasks"][0]["state"] == "waiting", 20)
            assert check(fleet)["reserved"] == 0, "nobody waits for that answer"
        check(fleet)
        assert len(fleet.rows()["corrections"]) < NUM
        assert wait_for(lambda: not texts_left(fleet), 10)
