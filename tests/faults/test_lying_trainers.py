"""Every script of the sim trainer, as a real process, is judged for what it is: never registered, never a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from support.programs import World, adapter_ref, finish, strays, wait_until
from tunesmith.core.errors import ProgramError
from tunesmith.programs.launch import tail_of_log
from tunesmith.programs.protocol import CheckpointEvent, Metrics
from tunesmith.programs.result_check import CheckedResult, check_evaluate_result, check_train_result, read_scores
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AdapterRef, Subject, TrainSpec
from tunesmith.training.trainers.sim.options import Script


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def judged(world: World, spec: TrainSpec) -> CheckedResult:
    code = world.run(spec)
    assert strays(spec.attempt.attempt_id) == []
    return check_train_result(spec, world.folder(spec), code)


ENDS: dict[str, tuple[AttemptState, ErrorClass | None, str]] = {
    "finish": (AttemptState.SUCCEEDED, None, ""),
    "spike": (AttemptState.SUCCEEDED, None, ""),
    "slow": (AttemptState.SUCCEEDED, None, ""),
    "fork": (AttemptState.SUCCEEDED, None, ""),
    "ignore_term": (AttemptState.SUCCEEDED, None, ""),
    "fail": (AttemptState.FAILED, ErrorClass.TRANSIENT, "scripted failure"),
    "raise": (AttemptState.FAILED, ErrorClass.BUG, "scripted exception"),
    "oom_exit": (AttemptState.FAILED, ErrorClass.OOM, "memory"),
    "crash": (AttemptState.FAILED, ErrorClass.CRASH, "SIGSEGV"),
    "kill_self": (AttemptState.FAILED, ErrorClass.CRASH, "SIGKILL"),
    "nan_loss": (AttemptState.FAILED, ErrorClass.NONFINITE, "loss"),
    "nan_weights": (AttemptState.FAILED, ErrorClass.NONFINITE, "NaN"),
    "wrong_fingerprint": (AttemptState.FAILED, ErrorClass.MISMATCH, "dataset_fingerprint"),
    "missing_artifact": (AttemptState.FAILED, ErrorClass.MISMATCH, "artifact"),
    "stale_token": (AttemptState.FAILED, ErrorClass.MISMATCH, "token"),
    "untrained": (AttemptState.FAILED, ErrorClass.MISMATCH, "nothing was learnt"),
    "no_tokens": (AttemptState.FAILED, ErrorClass.MISMATCH, "num_trained_tokens"),
    "exit0_no_result": (AttemptState.FAILED, ErrorClass.PROTOCOL, "without a result"),
    "success_exit_1": (AttemptState.FAILED, ErrorClass.PROTOCOL, "exited 1"),
    "two_results": (AttemptState.FAILED, ErrorClass.PROTOCOL, "stdout"),
    "garbage_events": (AttemptState.FAILED, ErrorClass.PROTOCOL, "events"),
    "half_line": (AttemptState.FAILED, ErrorClass.PROTOCOL, "half a line"),
    "huge_line": (AttemptState.FAILED, ErrorClass.PROTOCOL, "1 MiB"),
    "step_backwards": (AttemptState.FAILED, ErrorClass.PROTOCOL, "forward only"),
    "escape_path": (AttemptState.FAILED, ErrorClass.PROTOCOL, "outside its folder"),
}
NEVER_END = {"stall", "cling"}
TALKS_ON = {"chatter"}
"""Never ends either, and writes events all the while; see test_worker_faults."""


def test_scripts_all_are_covered() -> None:
    assert set(ENDS) | NEVER_END | TALKS_ON == set(get_args(Script))


@pytest.mark.parametrize("script", ENDS)
def test_sim_script_is_judged_as_it_should(world: World, script: str) -> None:
    outcome, error_class, word = ENDS[script]
    spec = world.train_spec(options={"script": script, "error_class": "transient"})
    judgement = judged(world, spec)
    assert (judgement.outcome, judgement.error_class) == (outcome, error_class), judgement.error
    assert word in (judgement.error or "")


def is_training(folder: Path) -> bool:
    return '"phase":"train"' in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize("script", sorted(NEVER_END))
def test_sim_script_that_never_ends_is_killed_with_all_it_started(world: World, script: str) -> None:
    spec = world.train_spec(options={"script": script, "at_step": 1})
    running = world.launch(spec)
    wait_until(lambda: (world.folder(spec) / "events.jsonl").exists() and is_training(world.folder(spec)))
    time.sleep(0.3)
    assert not [event for event in running.events() if isinstance(event, Metrics)]
    assert running.poll() is None
    running.kill_tree(0.3)
    code = running.poll()
    assert code == -9
    assert strays(spec.attempt.attempt_id) == []
    checked = check_train_result(spec, world.folder(spec), code)
    assert (checked.outcome, checked.error_class) == (AttemptState.FAILED, ErrorClass.CRASH)


def test_sim_that_hangs_shows_where_when_asked(world: World) -> None:
    spec = world.train_spec(options={"script": "stall", "at_step": 1})
    running = world.launch(spec)
    wait_until(lambda: (world.folder(spec) / "events.jsonl").exists() and is_training(world.folder(spec)))

    def is_shown() -> bool:
        running.dump_stacks()  # asked again: it may say that it trains a moment before it hangs
        time.sleep(0.2)
        return "in _stall" in tail_of_log(world.folder(spec))

    wait_until(is_shown)
    assert running.poll() is None


@pytest.mark.parametrize("script", ["garbage_events", "huge_line", "step_backwards", "escape_path"])
def test_sim_breach_is_noticed_while_it_runs(world: World, script: str) -> None:
    running = world.launch(world.train_spec(options={"script": script, "steps": 400, "at_step": 2}))
    with pytest.raises(ProgramError):
        wait_until(lambda: (running.events(), None)[1])
    assert running.poll() is None
    running.kill_tree(5.0)


def test_sim_fail_attempts_makes_later_attempts_finish(world: World) -> None:
    options = {"script": "crash", "fail_attempts": 2}
    outcomes = [judged(world, world.train_spec(options=options, number=number)).outcome for number in (1, 2, 3)]
    assert outcomes == [AttemptState.FAILED, AttemptState.FAILED, AttemptState.SUCCEEDED]


def test_sim_oom_once_finishes_with_smaller_batches(world: World) -> None:
    options = {"script": "oom_exit", "oom_once": True}
    assert judged(world, world.train_spec(options=options)).error_class is ErrorClass.OOM
    assert judged(world, world.train_spec(options=options, divisor=2)).outcome is AttemptState.SUCCEEDED


def test_sim_unknown_option_is_a_config_failure(world: World) -> None:
    judgement = judged(world, world.train_spec(options={"stepz": 3}))
    assert judgement.error_class is ErrorClass.CONFIG
    assert "stepz" in (judgement.error or "")


def trained_adapter(world: World, **options: object) -> AdapterRef:
    spec = world.train_spec(options=options)
    judgement = judged(world, spec)
    assert judgement.result is not None
    assert judgement.result.artifact is not None
    return adapter_ref(world, spec, judgement.result.artifact.digest)


def test_sim_untrained_from_a_start_adapter_is_noticed(world: World) -> None:
    start = trained_adapter(world)
    assert judged(world, world.train_spec(start=start)).outcome is AttemptState.SUCCEEDED
    judgement = judged(world, world.train_spec(start=start, options={"script": "untrained"}))
    assert judgement.error_class is ErrorClass.MISMATCH
    assert "nothing was learnt" in (judgement.error or "")


EVALUATIONS: dict[str | None, tuple[AttemptState, ErrorClass | None]] = {
    None: (AttemptState.SUCCEEDED, None),
    "crash": (AttemptState.FAILED, ErrorClass.CRASH),
    "nan": (AttemptState.SUCCEEDED, None),  # the gate says no to it
    "partial": (AttemptState.FAILED, ErrorClass.MISMATCH),
    "error": (AttemptState.SUCCEEDED, None),  # the gate says no to it
    "wrong_digest": (AttemptState.FAILED, ErrorClass.MISMATCH),
}


@pytest.mark.parametrize("script", EVALUATIONS)
def test_sim_evaluation_script_is_judged_as_it_should(world: World, script: str | None) -> None:
    adapter = trained_adapter(world, eval_script=script, quality=0.8)
    subjects = (Subject(label="candidate", adapter=adapter), Subject(label="baseline", adapter=None))
    spec = world.evaluate_spec(subjects)
    judgement = check_evaluate_result(spec, world.folder(spec), world.run(spec))
    assert (judgement.outcome, judgement.error_class) == EVALUATIONS[script], judgement.error
    if judgement.result is not None:
        scores = read_scores(world.folder(spec), judgement.result).by_subject
        assert len(scores["candidate"]) == len(scores["baseline"]) == spec.cases.num
        assert any(score.error for score in scores["candidate"]) is (script == "error")


def test_sim_checkpoints_named_in_events_are_there(world: World) -> None:
    running = world.launch(world.train_spec())
    assert finish(running) == 0
    named = [event.path for event in running.events() if isinstance(event, CheckpointEvent)]
    assert named == ["step-2", "step-3", "step-4", "step-5"]
    assert all((running.directory / "checkpoints" / name / "adapter").is_dir() for name in named)
