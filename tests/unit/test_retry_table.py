"""The retry table: what each way an attempt can end does to its task, and that crashes and errors count apart."""

from __future__ import annotations

import pytest

from tunesmith.runs.rules.task import (
    MAX_CRASHES,
    MAX_ERRORS,
    RETRY_TABLE,
    TASK,
    AttemptState,
    Counts,
    ErrorClass,
    TaskState,
    after_attempt,
    backoff_s,
)

# By hand from DESIGN: "exit code, signal or error class → retry / retry with smaller micro-packs / never.
# Preemption, disk full and requests are free. Parked after 3 crashes."
TABLE = """
    crash      crashed
    stalled    crashed
    oom        smaller
    transient  again
    disk       waits
    config     never
    data       never
    protocol   never
    mismatch   never
    nonfinite  never
    budget     never
    target     never
    missing    never
    bug        never
"""
RULES = [line.split() for line in TABLE.strip().splitlines()]


def test_table_names_every_error_class() -> None:
    assert dict(RULES) == {e.value: rule.value for e, rule in RETRY_TABLE.items()}
    assert set(RETRY_TABLE) == set(ErrorClass)


@pytest.mark.parametrize("name", [name for name, rule in RULES if rule == "crashed"])
def test_crashes_back_off_and_are_parked_at_the_third(name: str) -> None:
    counts, seen = Counts(num_errors=2), []
    for _ in range(3):
        decision = after_attempt(AttemptState.FAILED, ErrorClass(name), counts)
        counts = decision.counts
        seen.append((decision.state, decision.delay_s, counts.num_crashes))
    assert seen == [(TaskState.WAITING, 1.0, 1), (TaskState.WAITING, 4.0, 2), (TaskState.PARKED, 0.0, 3)]
    assert counts.num_errors == 2


def test_lost_leases_count_as_crashes() -> None:
    counts = Counts(num_crashes=MAX_CRASHES - 1)
    assert after_attempt(AttemptState.LOST, None, counts).state is TaskState.PARKED
    assert after_attempt(AttemptState.LOST, None, Counts()).state is TaskState.WAITING


def test_transient_errors_are_tried_again_until_the_third_which_fails_and_does_not_park() -> None:
    counts, states = Counts(num_crashes=2), []
    for _ in range(MAX_ERRORS):
        decision = after_attempt(AttemptState.FAILED, ErrorClass.TRANSIENT, counts)
        counts = decision.counts
        states.append(decision.state)
    assert states == [TaskState.WAITING, TaskState.WAITING, TaskState.DONE]
    assert (counts.num_crashes, counts.num_errors) == (2, 3)


def test_out_of_memory_is_tried_once_more_with_smaller_batches() -> None:
    first = after_attempt(AttemptState.FAILED, ErrorClass.OOM, Counts())
    second = after_attempt(AttemptState.FAILED, ErrorClass.OOM, first.counts)
    assert (first.state, first.counts.num_shrinks, second.state) == (TaskState.WAITING, 1, TaskState.DONE)
    assert "smaller" in first.reason
    assert (second.counts.num_crashes, second.counts.num_errors) == (0, 0)


@pytest.mark.parametrize("name", [name for name, rule in RULES if rule == "never"])
def test_hopeless_errors_end_at_once_and_count_nothing(name: str) -> None:
    counts = Counts(1, 1, 1)
    decision = after_attempt(AttemptState.FAILED, ErrorClass(name), counts)
    assert (decision.state, decision.counts, decision.delay_s) == (TaskState.DONE, counts, 0.0)
    assert name in decision.reason


def test_failure_without_a_class_is_a_bug_and_not_tried_again() -> None:
    assert after_attempt(AttemptState.FAILED, None, Counts()).state is TaskState.DONE


def test_interruptions_are_free_for_ever() -> None:
    counts = Counts(2, 2, 1)
    for _ in range(100):
        decision = after_attempt(AttemptState.INTERRUPTED, None, counts)
        assert (decision.state, decision.counts, decision.delay_s) == (TaskState.WAITING, counts, 0.0)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (AttemptState.SUCCEEDED, TaskState.DONE),
        (AttemptState.STOPPED, TaskState.DONE),
        (AttemptState.CANCELLED, TaskState.CANCELLED),
    ],
)
def test_final_outcomes_end_the_task_and_count_nothing(outcome: AttemptState, state: TaskState) -> None:
    counts = Counts(1, 2, 0)
    decision = after_attempt(outcome, None, counts)
    assert (decision.state, decision.counts) == (state, counts)


def test_open_attempt_has_no_decision() -> None:
    with pytest.raises(ValueError, match="has not ended"):
        after_attempt(AttemptState.OPEN, None, Counts())


def test_every_decision_is_a_transition_that_a_leased_task_may_take() -> None:
    for outcome in set(AttemptState) - {AttemptState.OPEN}:
        for error in [None, *ErrorClass]:
            for crashes in range(4):
                for errors in range(4):
                    decision = after_attempt(outcome, error, Counts(crashes, errors, crashes % 2))
                    assert TASK.allows(TaskState.LEASED, decision.state)
                    assert decision.reason
                    assert decision.delay_s >= 0.0
                    assert decision.delay_s == 0.0 or decision.state is TaskState.WAITING


def test_backoff_grows_fourfold_up_to_five_minutes() -> None:
    assert [backoff_s(n) for n in range(7)] == [1.0, 1.0, 4.0, 16.0, 64.0, 256.0, 300.0]
    assert backoff_s(1000) == 300.0
