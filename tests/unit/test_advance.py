"""What counts as progress of a program: only what it has not told before."""

from __future__ import annotations

from typing import Any

from tunesmith.profiles.settings import Phase
from tunesmith.programs.progress import Advance
from tunesmith.programs.protocol import (
    Ack,
    CheckpointEvent,
    Event,
    Log,
    Metrics,
    PhaseEvent,
    Progress,
    Started,
    ValidationEvent,
)


def metrics(step: int) -> Metrics:
    return Metrics(seq=1, at=1.0, step=step, values={"loss": 1.0})


def progress(done: int, total: int = 10, unit: str = "case") -> Progress:
    return Progress(seq=1, at=1.0, done=done, total=total, unit=unit)


def phase(name: Phase, detail: str = "") -> PhaseEvent:
    return PhaseEvent(seq=1, at=1.0, phase=name, detail=detail)


def taken(events: list[Any]) -> list[bool]:
    advance = Advance()
    return [advance.takes(event) for event in events]


def test_each_new_step_case_and_phase_is_progress() -> None:
    events: list[Event] = [
        Started(seq=1, at=1.0, pid=1), phase(Phase.LOAD), phase(Phase.TRAIN), metrics(1),
        progress(1, unit="step"), metrics(2), phase(Phase.VALIDATE), progress(1), progress(2),
        ValidationEvent(seq=1, at=1.0, step=2, values={}, is_best=True), phase(Phase.TRAIN), metrics(3),
        phase(Phase.VALIDATE), progress(1),
        CheckpointEvent(seq=1, at=1.0, step=3, path="a", digest="0", kinds=("last",)),
    ]  # fmt: skip
    assert taken(events) == [True] * len(events)


def test_the_same_again_is_no_progress_however_it_is_told() -> None:
    told: list[Event] = [
        metrics(5), progress(3), progress(5, 10, "step"), phase(Phase.SAVE), phase(Phase.TRAIN),
        Log(seq=1, at=1.0, message="still here"), Ack(seq=1, at=1.0, request_id="r"),
        CheckpointEvent(seq=1, at=1.0, step=5, path="a", digest="0", kinds=("last",)),
    ]  # fmt: skip
    advance = Advance()
    first = [advance.takes(event) for event in told]
    assert not any(first[5:7])
    again = [advance.takes(event) for _ in range(100) for event in told]
    assert not any(again[3 * len(told) :]), "a hang that talks would be kept alive"


def test_going_back_and_beyond_the_total_is_no_progress() -> None:
    assert taken([metrics(5), metrics(4), progress(4), progress(3), progress(11)]) == [True, False, True, False, False]


def test_ever_new_names_end() -> None:
    advance = Advance()
    units = [advance.takes(progress(1, unit=f"unit {number}")) for number in range(1000)]
    details = [advance.takes(phase(Phase.LOAD, f"part {number}")) for number in range(1000)]
    assert sum(units) + sum(details) < 50


def test_resumed_program_begins_at_its_step() -> None:
    assert taken([metrics(40), metrics(41)]) == [True, True]
