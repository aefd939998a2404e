"""What every evaluator owes, ours and one that a package brings: a value per metric and case, errors as errors.

And what the program around them owes: digests of what it read, subjects that do not touch each other, strict checks.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
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
from support.plugins import EXAMPLES, install_module, install_project, on_path
from support.programs import World, finish
from support.workspaces import PROFILE, a_profile, a_workspace
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.core.files import sha256_file
from tunesmith.deployment.rules.parity import compare
from tunesmith.evaluation.evaluators.main import evaluate
from tunesmith.evaluation.evaluators.registry import (
    EVALUATORS,
    GROUP,
    evaluator_of,
    evaluators_of,
    find_metric,
)
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.launch import launch
from tunesmith.programs.protocol import PhaseEvent, Progress, ResultStatus
from tunesmith.programs.result_check import check_evaluate_result, read_references, read_scores
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AdapterRef, BaseModelRef, EvaluateSpec, Subject, TrainSpec

ARGV = ("python", "-m", "tunesmith.evaluation.evaluators.main")
ALL = ("heldout_loss", "exact_match_greedy", "exact_match_sampled")
INSTALLED = ("json_valid", "answer_words")
PINNED = [[1.4910584917924983, 0.0, 0.0], [1.5673676738895836, 1.0, 1.0], [1.4331249842604485, 1.0, 1.0]]
METRICS_OF = {name: tuple(metric.name for metric in info.metrics) for name, info in EVALUATORS.items()}
METRICS_OF["json_answers"] = INSTALLED
METRICS_OF["verifier:ticket_number"] = ("verifier:ticket_number", "verifier:ticket_number:sampled")
SETTINGS: dict[str, dict[str, Any]] = {
    **{name.removeprefix("verifier:"): {} for name in METRICS_OF if name.startswith("verifier:")},
    "json_schema": {"schema": {"type": "object"}},
    "ticket_number": {"prefix": "AC"},
}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with on_path(install_project(EXAMPLES, tmp_path_factory.mktemp("site"))):
        yield


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


def wanting(spec: EvaluateSpec, *metrics: str) -> EvaluateSpec:
    """The spec with these metrics, and the settings of all verifiers."""
    evaluation = spec.evaluation.model_copy(update={"metrics": metrics})
    return spec.model_copy(update={"evaluation": evaluation, "verifiers": SETTINGS})


@pytest.mark.parametrize("name", METRICS_OF)
@pytest.mark.parametrize("make_spec", [held_out_spec, sim_spec], ids=["held_out", "sim"])
def test_evaluator_gives_every_case_a_value_of_each_metric_or_an_error(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef, make_spec: Any, name: str
) -> None:
    metrics = METRICS_OF[name]
    for metric in metrics:
        info = evaluator_of(metric)
        assert (info.name, find_metric(metric).name) == (name, metric)
        assert find_metric(metric).better in ("higher", "lower")
        assert info.description
        assert find_metric(metric).description
    spec = wanting(make_spec(tmp_path, base, adapter), *metrics)
    result, scores = evaluate_here(spec, tmp_path / "all")
    assert result.status is ResultStatus.SUCCEEDED
    for by_case in scores.by_subject.values():
        assert [score.case_id for score in by_case] == [f"case-{number}" for number in range(9)]
        for score in by_case:
            applies_not = {name for name in score.not_applicable if find_metric(name).neutral is not None}
            assert applies_not == set(score.not_applicable)
            assert {*score.values, *applies_not} == (set(metrics) if score.error is None else set())
            assert not applies_not & set(score.values)
            assert all(math.isfinite(value) for value in score.values.values())
    is_slow = make_spec is held_out_spec and name.startswith("verifier:")  # one of them stands for all
    for metric in metrics if not is_slow or name == "verifier:length" else ():  # asked for alone, the same values
        _, alone = evaluate_here(wanting(spec, metric), tmp_path / metric)
        for label, by_case in alone.by_subject.items():
            for score, other in zip(by_case, scores.by_subject[label], strict=True):
                assert score.values == {key: value for key, value in other.values.items() if key == metric}
                assert score.not_applicable == tuple(name for name in other.not_applicable if name == metric)


def test_importing_an_evaluator_is_cheap() -> None:
    code = (
        "import sys; from tunesmith.evaluation.evaluators.registry import find_metric; find_metric('json_valid');"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_numbers_of_ours_do_not_depend_on_others_that_run_too(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef
) -> None:
    spec = held_out_spec(tmp_path, base, adapter)
    _, ours = evaluate_here(spec, tmp_path / "ours")
    _, both = evaluate_here(wanting(spec, "answer_words", *reversed(ALL)), tmp_path / "both")
    # the references of these rows are no JSON: an error of one evaluator leaves no values of the others
    assert {score.error for score in both.by_subject["candidate"]} == {
        "the reference answer is not JSON, so the answer need not be"
    }
    for label, by_case in ours.by_subject.items():
        for score, other in zip(by_case, both.by_subject[label], strict=True):
            assert score.answers == {key: value for key, value in other.answers.items() if key in ALL}
    order = [info.name for info, _ in evaluators_of(["answer_words", *reversed(ALL)])]
    assert order == ["heldout_loss", "exact_match", "json_answers"]


def test_answers_are_generated_once_for_all_evaluators(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    spec = wanting(held_out_spec(tmp_path, base, adapter), "exact_match_greedy", *INSTALLED)
    evaluate_here(spec, tmp_path / "out")
    events = events_of(tmp_path / "out")
    phases = [event.detail for event in events if isinstance(event, PhaseEvent) and event.phase is Phase.GENERATE]
    assert phases == ["candidate greedy", "baseline greedy"]
    last = next(event for event in reversed(events) if isinstance(event, Progress))
    assert last.done == last.total == 9 * 2 * 3


def test_simulated_scores_stay_what_they_were(tmp_path: Path, base: BaseModelRef, adapter: AdapterRef) -> None:
    """Drills compare by them: the same quality has the same scores for ever."""
    _, scores = evaluate_here(wanting(sim_spec(tmp_path, base, adapter), *ALL), tmp_path / "out")
    told = [[score.values[metric] for metric in ALL] for score in scores.by_subject["candidate"][:3]]
    assert told == PINNED


CODE = """
from tunesmith.evaluation.evaluators.base import CaseScore, EvaluatorInfo, Metric
def measure(model, cases, metrics):
    {body}
EVALUATOR = EvaluatorInfo("odd", "breaks its contract", (Metric("oddness", "higher", "how odd it is"),), measure)
"""
VALID = "[CaseScore(case_id=case.id, values={'oddness': 1}) for case in cases]"


def installed_odd(site: Path, code: str) -> Path:
    return install_module(site, "odd_evaluator", code, {GROUP: {"odd": "odd_evaluator:EVALUATOR"}})


@pytest.mark.parametrize(
    ("body", "error_class", "reason"),
    [
        ("raise KeyError('x')", ErrorClass.BUG, "evaluator odd: KeyError: 'x'"),
        ("import no_such_package", ErrorClass.MISSING, "evaluator odd: ModuleNotFoundError: .*no_such_package"),
        ("return [1.0 for case in cases]", ErrorClass.BUG, "broke its contract: it returned a float, not a CaseScore"),
        (f"return {VALID}[1:]", ErrorClass.BUG, "it scored 8 cases, not the 9 given, in their order"),
        (f"return {VALID}[::-1]", ErrorClass.BUG, "it scored 9 cases, not the 9 given, in their order"),
        (f"return {VALID.replace('oddness', 'heldout_loss')}", ErrorClass.BUG, "it was not asked for 'heldout_loss'"),
        (f"return {VALID.replace('1}', '1j}')}", ErrorClass.BUG, "evaluator odd: ValidationError: "),
        (
            "return [CaseScore(case_id=case.id, not_applicable=('oddness',)) for case in cases]",
            ErrorClass.BUG,
            "'oddness' is not applicable to a case, and has a value or no neutral one",
        ),
    ],
)
def test_evaluator_that_breaks_its_contract_ends_the_evaluation_by_name(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef, body: str, error_class: ErrorClass, reason: str
) -> None:
    spec = wanting(sim_spec(tmp_path, base, adapter), "heldout_loss", "oddness")
    site = installed_odd(tmp_path / "site", CODE.format(body=body))
    with on_path(site), pytest.raises(ProgramFailure, match=reason) as failure:
        evaluate_here(spec, tmp_path / "out")
    assert failure.value.error_class is error_class
    assert not (tmp_path / "out" / "scores.json").exists()


@pytest.mark.parametrize(
    ("value", "error"),
    [("{}", "evaluator odd gave no value of oddness"), ("{'oddness': float('inf')}", "oddness is inf")],
)
def test_value_that_is_missing_or_not_finite_is_an_error_of_its_case(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef, value: str, error: str
) -> None:
    body = f"return [CaseScore(case_id=case.id, values={value}) for case in cases]"
    with on_path(installed_odd(tmp_path / "site", CODE.format(body=body))):
        spec = wanting(sim_spec(tmp_path, base, adapter), "oddness")
        _, scores = evaluate_here(spec, tmp_path / "out")
    assert {(score.error, len(score.values)) for score in scores.by_subject["candidate"]} == {(error, 0)}


VERIFIER = """
from tunesmith.verifiers.base import Finding, NoSettings, Verifier
def look(interaction, settings):
    raise RuntimeError("no dictionary")
VERIFIER = Verifier("spelling", "whether it is spelt well", NoSettings, look)
"""


def test_verifier_that_fails_is_an_error_of_the_case_never_a_score(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef
) -> None:
    entry = {"tunesmith.verifiers": {"spelling": "odd_verifier:VERIFIER"}}
    with on_path(install_module(tmp_path / "site", "odd_verifier", VERIFIER, entry)):
        spec = wanting(sim_spec(tmp_path, base, adapter), "verifier:spelling")
        spec = spec.model_copy(update={"verifiers": {"spelling": {}}})
        _, scores = evaluate_here(spec, tmp_path / "out")
    for score in scores.by_subject["candidate"]:
        assert score.values == {}
        assert "the verifier failed (RuntimeError: no dictionary)" in (score.error or "")


def test_metric_of_a_verifier_goes_by_its_settings_in_the_spec(
    tmp_path: Path, base: BaseModelRef, adapter: AdapterRef
) -> None:
    spec = wanting(held_out_spec(tmp_path, base, adapter), "verifier:length")
    means = {}
    for least in (0, 10_000):
        settings = {"length": {"min_chars": least, "max_chars": 20_000}}
        _, scores = evaluate_here(spec.model_copy(update={"verifiers": settings}), tmp_path / str(least))
        means[least] = sum(score.values["verifier:length"] for score in scores.by_subject["candidate"]) / 9
    assert means[0] == 1.0
    assert means[10_000] < 0.1


@pytest.mark.parametrize(("metric", "words"), [
    ("perplexity", "perplexity is e to the power of heldout_loss"),
    ("verifier:lenth", "no evaluator measures 'verifier:lenth'; did you mean 'verifier:length'"),
    ("verifier:length:greedy", "no evaluator measures 'verifier:length:greedy'"),
])  # fmt: skip
def test_metric_that_is_no_metric_is_refused_with_what_to_name_instead(metric: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_metric(metric)


def test_metric_that_two_installed_evaluators_measure_is_refused(tmp_path: Path) -> None:
    code = CODE.format(body="return []").replace("oddness", "json_valid")
    with (
        on_path(installed_odd(tmp_path, code)),
        pytest.raises(ConfigError, match="'json_answers' and 'odd' both measure 'json_valid'; uninstall one"),
    ):
        find_metric("json_valid")


def test_evaluator_of_a_package_cannot_take_a_metric_of_ours(tmp_path: Path) -> None:
    with on_path(installed_odd(tmp_path, CODE.format(body="return []").replace("oddness", "heldout_loss"))):
        assert evaluator_of("heldout_loss") is EVALUATORS["heldout_loss"]


def test_metric_that_nobody_measures_is_refused_before_queueing_with_the_nearest(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        a_profile(client.workspace.root, evaluation={"metrics": ["heldout_loss", "json_vald"]})
        expected = "profile support: evaluation.metrics: no evaluator measures 'json_vald'; did you mean 'json_valid'?"
        with pytest.raises(ConfigError) as refusal:
            client.profiles.check(PROFILE)
        assert refusal.value.message == expected
        source = client.workspace.root / "data.jsonl"
        source.write_text('{"prompt": "a", "completion": "b"}\n')
        with pytest.raises(ConfigError, match="no evaluator measures 'json_vald'"):
            client.runs.submit(PROFILE, source)
        a_profile(client.workspace.root, evaluation={"metrics": ["heldout_loss"]}, gate={"primary": "heldout_los"})
        with pytest.raises(ConfigError, match=r"gate\.primary: 'heldout_los' is not .*; did you mean 'heldout_loss'"):
            client.profiles.check(PROFILE)
        a_profile(client.workspace.root, evaluation={"metrics": [*ALL, *INSTALLED]}, gate={"primary": "json_valid"})
        client.profiles.check(PROFILE)


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
