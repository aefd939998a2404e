"""When a training saves and which checkpoints stay: decisions without a clock, a disk or a model."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tunesmith.profiles.profile import Checkpoints
from tunesmith.training.rules.save_schedule import SaveContext, is_due, should_checkpoint, steps_to_delete
from tunesmith.training.trainers.native.random_state import (
    put_random_state,
    random_json,
    random_tensors,
    seed_everything,
)

STEPS = st.sets(st.integers(1, 500), min_size=1, max_size=40)


def a_moment(step: int = 7, **changes: object) -> SaveContext:
    fields: dict[str, object] = {"num_steps": 100, "since_save_s": 0.0, "ended_epoch": None, "num_epochs": 3}
    return SaveContext(step=step, **(fields | changes))  # type: ignore[arg-type]


def by(**rhythm: object) -> Checkpoints:
    return Checkpoints.model_validate({"every_steps": None, **rhythm})


# ---- when -----------------------------------------------------------------------------------------------------------


def test_profile_saves_every_fifty_steps_unless_told_otherwise() -> None:
    policy = Checkpoints()
    assert [step for step in range(151) if is_due(policy, a_moment(step, num_steps=151))] == [50, 100, 150]


def test_profile_without_any_rhythm_is_refused() -> None:
    with pytest.raises(ValidationError, match="a run that never saves cannot resume"):
        by()


@pytest.mark.parametrize(
    "rhythm", [{"every_steps": 0}, {"every_minutes": 0}, {"every_minutes": float("inf")}, {"every_epochs": -1}]
)
def test_profile_with_an_impossible_rhythm_is_refused(rhythm: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(rhythm))):
        by(**rhythm)


def test_minutes_are_counted_from_the_last_save() -> None:
    policy = by(every_minutes=2.5)
    assert not is_due(policy, a_moment(since_save_s=149.9))
    assert is_due(policy, a_moment(since_save_s=150.0))


def test_epochs_count_only_at_their_last_step() -> None:
    policy = by(every_epochs=2)
    assert not is_due(policy, a_moment(ended_epoch=None, num_epochs=9))
    assert [epoch for epoch in range(1, 9) if is_due(policy, a_moment(ended_epoch=epoch, num_epochs=9))] == [2, 4, 6, 8]


def test_whichever_rhythm_is_due_decides() -> None:
    policy = by(every_steps=10, every_minutes=1, every_epochs=1)
    assert not is_due(policy, a_moment(7))
    assert is_due(policy, a_moment(10))
    assert is_due(policy, a_moment(7, since_save_s=60))
    assert is_due(policy, a_moment(7, ended_epoch=1))


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_last_step_is_always_saved_and_the_start_never(every: int, num_steps: int) -> None:
    assert is_due(by(every_steps=every), a_moment(num_steps, num_steps=num_steps))
    assert not is_due(by(every_steps=every), a_moment(0, num_steps=num_steps, since_save_s=1e9))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 50), st.booleans())
def test_epoch_is_saved_at_every_nth_at_the_last_and_at_the_best(
    epoch: int, total: int, every: int, is_best: bool
) -> None:
    expected = is_best or epoch == total or epoch % every == 0
    assert should_checkpoint(epoch, total, every=every, is_best=is_best) is expected


def test_epochs_are_saved_every_tenth_by_default() -> None:
    assert [epoch for epoch in range(1, 26) if should_checkpoint(epoch, 25)] == [10, 20, 25]
    assert should_checkpoint(3, 25, is_best=True)
    with pytest.raises(ValueError, match="at least 1"):
        should_checkpoint(3, 25, every=0)


# ---- what stays -----------------------------------------------------------------------------------------------------


@given(STEPS, st.integers(0, 10), st.data())
def test_best_and_last_and_the_newest_are_never_removed(steps: set[int], keep: int, data: st.DataObject) -> None:
    best = data.draw(st.none() | st.sampled_from(sorted(steps)))
    last = max(steps)
    removed = steps_to_delete(steps, best, last, keep)
    kept = steps - set(removed)
    assert {last} | ({best} if best is not None else set()) <= kept
    others = sorted(kept - {best, last})
    assert len(others) == min(keep, len(steps - {best, last}))
    assert all(gone < stays for gone in removed for stays in others)
    assert removed == sorted(removed)


@given(STEPS, st.integers(0, 10), st.data())
def test_removing_again_removes_nothing(steps: set[int], keep: int, data: st.DataObject) -> None:
    best = data.draw(st.none() | st.sampled_from(sorted(steps)))
    kept = steps - set(steps_to_delete(steps, best, max(steps), keep))
    assert steps_to_delete(kept, best, max(steps), keep) == []


def test_only_checkpoint_stays_even_where_none_is_to_be_kept() -> None:
    assert steps_to_delete([5], None, 5, 0) == []


# ---- random numbers -------------------------------------------------------------------------------------------------


def test_ranks_keep_their_own_random_numbers_in_one_state() -> None:
    tensors, plain, drawn = {}, {}, {}
    for rank in (0, 1):
        seed_everything(40 + rank)
        tensors |= random_tensors(rank)
        plain |= random_json(rank)
        drawn[rank] = (random.random(), float(torch.rand(1)))
    assert {name.partition("/")[0] for name in tensors} == {"rank-0", "rank-1"}
    plain = json.loads(json.dumps(plain))
    for rank in (1, 0):
        put_random_state(tensors, plain, rank)
        assert (random.random(), float(torch.rand(1))) == drawn[rank]
    with pytest.raises(KeyError, match="rank-2"):
        put_random_state(tensors, plain, 2)
