"""How long a run will train, and why it waits: each answer says what it rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.profiles.profile import HardwareTier, Recipe
from tunesmith.profiles.rules.lock import ArchitectureLock
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.waiting import QueueFacts, why_it_waits
from tunesmith.training.rules.estimate import Estimate, Pace, estimate_training

LOCK = ArchitectureLock(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=1000,
    context=512,
    hidden_size=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)


def estimate(
    num_examples: int = 100,
    num_characters: int = 35_000,
    tier: HardwareTier = HardwareTier.CPU,
    earlier: tuple[Pace, ...] = (),
    **recipe: float,
) -> Estimate:
    return estimate_training(
        num_examples=num_examples,
        num_characters=num_characters,
        recipe=Recipe.model_validate({"epochs": 1.0, **recipe}),
        lock=LOCK,
        tier=tier,
        earlier=earlier,
    )


def test_without_earlier_runs_it_rests_on_the_size_of_model_and_data() -> None:
    found = estimate()
    parameters, tokens = 12 * 2 * 100**2 + 1000 * 100, 10_000
    assert found.seconds == pytest.approx(4 * parameters * tokens / 3e10)
    assert "no earlier run" in found.basis
    assert "cpu" in found.basis


def test_grows_with_data_and_epochs_and_shrinks_with_hardware() -> None:
    assert estimate(epochs=3.0).seconds == pytest.approx(3 * estimate().seconds)
    assert estimate(num_examples=200, num_characters=70_000).seconds == pytest.approx(2 * estimate().seconds)
    by_tier = [estimate(tier=tier).seconds for tier in HardwareTier]
    assert by_tier == sorted(by_tier, reverse=True)
    assert len(set(by_tier)) == len(HardwareTier)


def test_earlier_runs_win_and_the_median_forgives_an_outlier() -> None:
    paces = (Pace(100, 10.0), Pace(100, 12.0), Pace(100, 900.0))
    found = estimate(num_examples=50, earlier=paces, epochs=2.0)
    assert found.seconds == pytest.approx(0.12 * 100)
    assert found.basis == "the pace of 3 earlier attempts"
    assert estimate(earlier=paces[:1]).basis == "the pace of 1 earlier attempt"


def test_earlier_runs_that_say_nothing_are_left_out() -> None:
    assert "no earlier run" in estimate(earlier=(Pace(0, 10.0), Pace(10, 0.0))).basis


def test_step_limit_bounds_what_is_seen() -> None:
    paces = (Pace(100, 100.0),)
    unlimited = estimate(num_examples=1000, num_characters=350_000, earlier=paces, epochs=10.0)
    limited = estimate(
        num_examples=1000, num_characters=350_000, earlier=paces, epochs=10.0, max_steps=10, batch_tokens=1000
    )
    assert unlimited.seconds == pytest.approx(10_000)
    assert limited.seconds == pytest.approx(10 * 10)  # ten examples of a hundred tokens a step


def test_nothing_to_train_on_takes_no_time_and_no_crash() -> None:
    assert estimate(num_examples=0, num_characters=0).seconds == 0.0


FACTS = QueueFacts(
    state=RunState.QUEUED,
    is_leased=False,
    is_stopped_by_estop=False,
    num_workers=1,
    num_before=0,
    backoff_s=0.0,
    reason="because",
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "a worker will take it"),
        ({"num_before": 1}, "1 task before it"),
        ({"num_before": 7}, "7 tasks before it"),
        ({"backoff_s": 3.6, "num_before": 7}, "tried again in 4 s: because"),
        (
            {"state": RunState.WATCHING, "backoff_s": 5.0, "reason": "healthy"},
            "the next check of the watch is in 5 s; the last one: healthy",
        ),
        ({"num_workers": 0, "backoff_s": 3.0}, "no worker is running; start one with `tunesmith worker`"),
        ({"is_stopped_by_estop": True, "num_workers": 0}, "`tunesmith estop off`"),
        ({"state": RunState.HELD}, "because"),
        ({"state": RunState.PAUSED}, "because"),
    ],
)
def test_reason_names_the_first_thing_in_the_way(changes: dict[str, object], expected: str) -> None:
    told = why_it_waits(replace(FACTS, **changes))  # type: ignore[arg-type]
    assert told is not None
    assert expected in told


@pytest.mark.parametrize("state", sorted(RUN.finished))
def test_finished_run_waits_for_nothing(state: RunState) -> None:
    assert why_it_waits(replace(FACTS, state=state, num_workers=0)) is None


@pytest.mark.parametrize("state", [RunState.TRAINING, RunState.EVALUATING, RunState.DEPLOYING, RunState.WATCHING])
def test_run_that_somebody_works_on_waits_for_nothing(state: RunState) -> None:
    assert why_it_waits(replace(FACTS, state=state, is_leased=True)) is None


def test_every_unfinished_state_without_a_worker_has_a_reason_or_is_under_way() -> None:
    for state in RUN.unfinished - {RunState.TRAINING, RunState.SHADOWING}:
        assert why_it_waits(replace(FACTS, state=state)) is not None, state
