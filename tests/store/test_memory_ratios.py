"""What earlier trainings took of their forecasts comes back from the store, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from support import tables
from support.rows import a_claimed_run, force
from tunesmith.core.clock import utc_now
from tunesmith.runs.queries import queue
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store.database import Database
from tunesmith.training.memory_estimate import corrections


def an_ended_training(database: Database, memory: Any, state: str = "succeeded", profile: str = "support") -> None:
    with database.write() as tx:
        _, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN, profile=profile)
        result = None if memory is None else {"detail": {"memory": memory}}
        force(tx, tables.attempts, claim.attempt.id, state=state, ended_at=utc_now(), result=result)


def test_ratios_of_succeeded_trainings_come_by_key_from_any_profile_the_newest_first(database: Database) -> None:
    an_ended_training(database, {"key": "a", "ratio": 1.25})
    an_ended_training(database, {"key": "b", "ratio": 3})
    an_ended_training(database, {"key": "a", "ratio": 0.75}, profile="other")
    an_ended_training(database, {"key": "a", "ratio": 9.0}, state="failed")
    with database.read() as tx:
        assert queue.memory_ratios(tx) == {"a": [0.75, 1.25], "b": [3.0]}
        assert queue.memory_ratios(tx, limit=1) == {"a": [0.75]}
    assert corrections(database) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "memory",
    [
        None,
        "much",
        [],
        {},
        {"key": "a"},
        {"key": 7, "ratio": 1.0},
        {"key": "a", "ratio": "NaN"},
        {"key": "a", "ratio": True},
    ],
)
def test_what_a_strange_program_told_is_passed_over(database: Database, memory: Any) -> None:
    an_ended_training(database, memory)
    assert corrections(database) == {}
