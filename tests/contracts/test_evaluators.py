"""What every evaluator owes: scores of every case under every subject, digests of what it read, errors as errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_program,
    a_recipe,
    a_train_spec,
    adapter_ref,
    an_evaluate_spec,
    evaluate_here,
    events_of,
    rows_of,
    small_rows,
    train_here,
)
from support.programs import World, finish
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.core.files import sha256_file
from tunesmith.deployment.rules.parity import compare
from tunesmith.evaluation.evaluators.held_out import evaluate
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.launch import launch
from tunesmith.programs.protocol import PhaseEvent, Progress, ResultStatus
from tunesmith.programs.result_check import check_evaluate_result, read_references, read_scores
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AdapterRef, BaseModelRef, EvaluateSpec, Subject, TrainSpec

ARGV = ("python", "-m", "tunesmith.evaluation.evaluators.main")
ALL = ("heldout_loss", "exact_match_greedy", "exact_match_sampled")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluators")


@pytest.fixture(scope="module")
def base(root: Path) -> BaseModelRef:
    return a_base_ref(a_micro_base(root / "base"))


@pytest.fixture(scope="module")
def adapter(root: Path, base: BaseModelRef) -> AdapterRef:
    """A few steps, with trained embeddings: what is hardest to take off a base again."""
    data = a_dataset(root / "data", small_rows(40))
    recipe = a_recipe(max_steps=8, lr=1e-2, train_embeddings=True)
    return adapter_ref(root / "trained", train_here(a_train_spec(base, data, recipe=recipe), root / "trained"))


def held_out_spec(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> EvaluateSpec:
    return an_evaluate_spec(tmp_path, base, small_rows(9), adapter, metrics=ALL, max_new_tokens=6, batch_size=4)


def sim_spec(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> EvaluateSpec:
    world = World(tmp_path / "sim")
    spec: TrainSpec = world.train_spec("sim", options={"steps": 2})
    assert world.run(spec) == 0
    result = json.loads((world.folder(spec) / "result.json").read_bytes())
    made = AdapterRef(id="ad-1", path=str(world.folder(spec) / "artifact"), digest=result["artifact"]["digest"])
    subjects = (Subject(label="candidate", adapter=made), Subject(label="baseline", adapter=None))
    return world.evaluate_spec(subjects, num_cases=9)


@pytest.mark.parametrize("make_spec", [held_out_spec, sim_spec], ids=["held_out", "sim"])
def test_evaluator_scores_every_case_of_every_subject_and_is_believed(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef, make_spec: Any
) -> None:
    spec = make_spec(tmp_path, base, adapter)
    code = finish(launch(ARGV, spec, tmp_path / "out"), 90)
    judged = check_evaluate_result(spec, tmp_path / "out", code)
    assert (code, judged.outcome, judged.error) == (0, AttemptState.SUCCEEDED, None)
    assert judged.result is not None
    assert judged.result.scores is not None
    assert judged.result.scores.digest == sha256_file(tmp_path / "out" / judged.result.scores.path)
    scores = read_scores(tmp_path / "out", judged.result)
    assert set(scores.by_subject) == {"candidate", "baseline"}
    for by_case in scores.by_subject.values():
        assert [score.case_id for score in by_case] == [f"case-{number}" for number in range(9)]
        assert all(set(score.values) == set(spec.evaluation.metrics) for score in by_case)
        assert all(math.isfinite(value) for score in by_case for value in score.values.values())


@pytest.mark.parametrize("make_spec", [held_out_spec, sim_spec], ids=["held_out", "sim"])
def test_evaluator_writes_down_what_the_candidate_answers(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef, make_spec: Any
) -> None:
    """What a target will be compared with: about the candidate, bound by its hash, the same every time."""
    spec = make_spec(tmp_path, base, adapter)
    told = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        code = finish(launch(ARGV, spec, folder), 90)
        result = check_evaluate_result(spec, folder, code).result
        assert result is not None
        assert result.references is not None
        told.append(read_references(folder, result.references.digest))
    assert told[0] == told[1]
    assert (told[0].adapter, told[0].base) == (spec.subjects[0].adapter.digest, spec.base.digest)
    assert len(told[0].readings) == 6
    assert compare(told[0], told[1].readings, 0.0).is_same


def test_candidate_without_numbers_has_no_references(tmp_path: Path, adapter: AdapterRef) -> None:
    broken = a_base_ref(a_micro_base(tmp_path / "base", nan_in="model.norm.weight"))
    result, _ = evaluate_here(an_evaluate_spec(tmp_path, broken, small_rows(3), adapter), tmp_path / "out")
    assert (result.status, result.references) == (ResultStatus.SUCCEEDED, None)


def test_subjects_do_not_touch_each_other(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    """The base is loaded once; what an adapter did to it must be gone when the next subject comes."""
    spec = held_out_spec(tmp_path, base, adapter)
    _, there = evaluate_here(spec, tmp_path / "there")
    turned = spec.model_copy(update={"subjects": tuple(reversed(spec.subjects))})
    _, back = evaluate_here(turned, tmp_path / "back")
    alone = spec.model_copy(update={"subjects": (Subject(label="baseline", adapter=None),)})
    _, only = evaluate_here(alone, tmp_path / "alone")
    assert there.by_subject == back.by_subject
    assert there.by_subject["baseline"] == only.by_subject["baseline"]
    assert there.by_subject["candidate"] != there.by_subject["baseline"]


def test_scores_do_not_depend_on_the_batch_size(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    spec = held_out_spec(tmp_path, base, adapter)
    _, by_four = evaluate_here(spec, tmp_path / "four")
    one = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"batch_size": 1})})
    _, by_one = evaluate_here(one, tmp_path / "one")
    for label in by_four.by_subject:
        for ours, theirs in zip(by_four.by_subject[label], by_one.by_subject[label], strict=True):
            assert ours.values == pytest.approx(theirs.values, rel=1e-4)
            assert ours.answers == theirs.answers


def test_case_that_cannot_be_scored_is_an_error_never_a_score(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef
) -> None:
    odd = [
        {"messages": [{"role": "user", "content": "no answer follows"}]},
        *rows_of([("too long", "word " * 100)]),
        *small_rows(2),
    ]
    result, scores = evaluate_here(an_evaluate_spec(tmp_path, base, odd, adapter), tmp_path / "out")
    assert result.status is ResultStatus.SUCCEEDED
    for by_case in scores.by_subject.values():
        assert [score.error is None for score in by_case] == [False, False, True, True]
        assert by_case[0].values == by_case[1].values == {}
        assert "256" in (by_case[1].error or "")


def test_loss_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    broken = a_base_ref(a_micro_base(tmp_path / "base", nan_in="model.norm.weight"))
    _, scores = evaluate_here(an_evaluate_spec(tmp_path, broken, small_rows(3), None), tmp_path / "out")
    assert all(score.values == {} and "nan" in (score.error or "") for score in scores.by_subject["baseline"])


def test_adapter_that_changed_is_refused(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    other = adapter.model_copy(update={"digest": "0" * 64})
    with pytest.raises(DataError, match="expected 0000"):
        evaluate_here(held_out_spec(tmp_path, base, other), tmp_path / "out")


def test_base_that_changed_is_refused(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    other = base.model_copy(update={"digest": "0" * 64})
    with pytest.raises(ProgramFailure, match="changed") as refusal:
        evaluate_here(held_out_spec(tmp_path, other, adapter), tmp_path / "out")
    assert refusal.value.error_class is ErrorClass.MISMATCH


def test_cases_that_changed_are_refused(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    spec = held_out_spec(tmp_path, base, adapter)
    with Path(spec.cases.path).open("a") as cases:
        cases.write("\n")
    with pytest.raises(ProgramFailure, match="cases changed") as refusal:
        evaluate_here(spec, tmp_path / "out")
    assert refusal.value.error_class is ErrorClass.DATA


def test_file_that_holds_no_cases_is_refused(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    spec = held_out_spec(tmp_path, base, adapter)
    path = Path(spec.cases.path)
    path.write_text('["not", "a", "case"]\n' * 9)
    cases = spec.cases.model_copy(update={"digest": sha256_file(path)})
    with pytest.raises(DataError, match="not a file of cases"):
        evaluate_here(spec.model_copy(update={"cases": cases}), tmp_path / "out")


def test_unknown_metric_is_refused_by_name(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    spec = held_out_spec(tmp_path, base, adapter)
    evaluation = spec.evaluation.model_copy(update={"metrics": ("bleu",)})
    with pytest.raises(ConfigError, match=r"'bleu'.*heldout_loss"):
        evaluate_here(spec.model_copy(update={"evaluation": evaluation}), tmp_path / "out")


def test_progress_and_phases_are_told(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    evaluate_here(held_out_spec(tmp_path, base, adapter), tmp_path / "out")
    events = events_of(tmp_path / "out")
    phases = [event.phase for event in events if isinstance(event, PhaseEvent)]
    assert phases[:2] == [Phase.HASH, Phase.LOAD]
    assert {Phase.SCORE, Phase.GENERATE} <= set(phases)
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    last = next(event for event in reversed(events) if isinstance(event, Progress))
    assert last.done == last.total == 9 * 2 * 3


def test_term_interrupts_between_batches(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    program = a_program(held_out_spec(tmp_path, base, adapter), tmp_path / "out")
    program.terminating = True
    assert evaluate(program).status is ResultStatus.INTERRUPTED
    assert not (tmp_path / "out" / "scores.json").exists()
