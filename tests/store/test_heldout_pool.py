"""The held-out pool: grows with proven rounds, never holds a prompt twice, keeps old and new over its limit."""

from __future__ import annotations

import pytest

from support.rows import PROFILE, a_dataset, a_run, dump
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.queries import HeldoutCase
from tunesmith.profiles.sections.evaluation import EvaluationSettings
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Database, Tx


def _cases(first: int, num: int, answer: str = "yes") -> list[HeldoutCase]:
    return [
        HeldoutCase(f"prompt-{i}", [{"role": "user", "content": str(i)}, {"role": "assistant", "content": answer}])
        for i in range(first, first + num)
    ]


def _round(tx: Tx, first: int, num: int, end: RunState | None, answer: str = "yes") -> str:
    """A dataset with held-out cases, and how the run on it ended."""
    dataset_id = a_dataset(tx)
    datasets.add_cases(tx, PROFILE, dataset_id, _cases(first, num, answer))
    if end is not None:
        a_run(tx, end, dataset_id=dataset_id)
    return dataset_id


def _ids(tx: Tx, dataset_id: str, limit: int = 1000) -> list[str]:
    return [case.id for case in datasets.pool(tx, PROFILE, dataset_id, limit)]


@pytest.mark.parametrize("end", [*RunState, None])
def test_cases_of_earlier_datasets_count_once_their_run_proved_itself(database: Database, end: RunState | None) -> None:
    with database.write() as tx:
        _round(tx, 0, 5, end)
        own = _round(tx, 5, 5, None)
        proven = end in (RunState.WATCHING, RunState.DEPLOYED, RunState.COMPLETED)
        expected = [f"prompt-{i}" for i in range(0 if proven else 5, 10)]
        assert _ids(tx, own) == expected
        established = [case.id for case in datasets.pool(tx, PROFILE, own, 1000) if case.is_established]
        assert established == expected[: len(expected) - 5]


def test_pool_accumulates_over_rounds(database: Database) -> None:
    with database.write() as tx:
        for number in range(4):
            own = _round(tx, number * 10, 10, RunState.DEPLOYED)
            assert len(_ids(tx, own)) == (number + 1) * 10


def test_pool_holds_a_prompt_once_and_the_proven_answer_wins(database: Database) -> None:
    with database.write() as tx:
        _round(tx, 0, 4, RunState.DEPLOYED, answer="first")
        _round(tx, 0, 4, RunState.COMPLETED, answer="second")
        own = _round(tx, 2, 4, None, answer="mine")
        pool = datasets.pool(tx, PROFILE, own, 1000)
        assert [case.id for case in pool] == [f"prompt-{i}" for i in range(6)]
        answers = [case.messages[-1]["content"] for case in pool]
        assert answers == ["first"] * 4 + ["mine"] * 2
        assert [case.is_established for case in pool] == [True] * 4 + [False] * 2


def test_unproven_answer_to_an_established_prompt_does_not_replace_it_whatever_came_first(database: Database) -> None:
    """A poisoned file prepared before the good one must not become its yardstick."""
    with database.write() as tx:
        own = _round(tx, 0, 3, None, answer="poison")
        _round(tx, 0, 3, RunState.DEPLOYED, answer="good")
        pool = datasets.pool(tx, PROFILE, own, 1000)
        assert [case.messages[-1]["content"] for case in pool] == ["good"] * 3


def test_same_case_twice_in_one_dataset_is_kept_once(database: Database) -> None:
    with database.write() as tx:
        dataset_id = a_dataset(tx)
        datasets.add_cases(tx, PROFILE, dataset_id, _cases(0, 3) + _cases(0, 3))
        assert _ids(tx, dataset_id) == ["prompt-0", "prompt-1", "prompt-2"]


@pytest.mark.parametrize("limit", [1, 7, 50, 99, 100, 101])
def test_limit_keeps_old_and_new_in_the_same_share_without_twins(database: Database, limit: int) -> None:
    with database.write() as tx:
        for number in range(4):
            own = _round(tx, number * 25, 25, RunState.DEPLOYED)
        chosen = _ids(tx, own, limit)
        assert len(chosen) == len(set(chosen)) == min(limit, 100)
        per_round = [sum(int(case.split("-")[1]) // 25 == number for case in chosen) for number in range(4)]
        assert max(per_round) - min(per_round) <= 1
        assert chosen == _ids(tx, own, limit)  # the same cases every time


def test_pool_of_many_rounds_is_cut_at_a_thousand_evenly_over_age(database: Database) -> None:
    """By default. Each round keeps the same part of what it brought, and the newest one is judged on its own cases."""
    cap = EvaluationSettings().max_cases
    assert cap == 1000
    sizes = [400, 30, 500, 70, 14, 300, 86]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    with database.write() as tx:
        for first, size in zip(firsts[:-1], sizes[:-1], strict=True):
            _round(tx, first, size, RunState.DEPLOYED)
        own = _round(tx, firsts[-1], sizes[-1], None)
        chosen = [int(case.split("-")[1]) for case in _ids(tx, own, cap)]
    assert len(chosen) == len(set(chosen)) == cap
    for first, size in zip(firsts, sizes, strict=True):
        kept = sum(first <= case < first + size for case in chosen)
        assert abs(kept - size * cap / sum(sizes)) <= 1


def test_pools_of_profiles_are_apart(database: Database) -> None:
    with database.write() as tx:
        foreign = a_dataset(tx, "other")
        datasets.add_cases(tx, "other", foreign, _cases(0, 5))
        a_run(tx, RunState.DEPLOYED, dataset_id=foreign, profile="other")
        own = _round(tx, 100, 2, None)
        assert _ids(tx, own) == ["prompt-100", "prompt-101"]


def test_reading_the_pool_changes_nothing(database: Database) -> None:
    with database.write() as tx:
        own = _round(tx, 0, 5, RunState.DEPLOYED)
    before = dump(database)
    with database.read() as tx:
        _ids(tx, own, 3)
    assert dump(database) == before
