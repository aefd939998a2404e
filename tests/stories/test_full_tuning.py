"""Full fine-tuning: every weight of a small model, as an artefact of its own kind, from training to deployed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_recipe,
    a_train_spec,
    adapter_ref,
    an_evaluate_spec,
    evaluate_here,
    losses_of,
    resume_from,
    small_rows,
    train_here,
)
from tunesmith.core.errors import ConfigError
from tunesmith.core.files import sha256_file
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.profiles.profile import Checkpoints, Recipe
from tunesmith.programs.artifact import adapter_problems
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import BaseModelRef, DatasetRef

FULL = {"tuning": "full", "lr": 3e-3, "max_steps": 8, "epochs": 50.0}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("full") / "base", tied=request.param))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("full") / "data", small_rows(60), validation_share=0.2)


def test_full_tuning_makes_a_model_of_its_own_that_scores_better(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    import torch

    spec = a_train_spec(base, data, recipe=a_recipe(**FULL), expected_artifact="model")
    result = train_here(spec, tmp_path / "out")
    folder = tmp_path / "out" / "artifact"
    assert adapter_problems(tmp_path / "out", result.artifact, None, "model") == []
    assert not (folder / "adapter_config.json").exists()
    assert load_tokenizer(folder).chat_template == load_tokenizer(Path(base.path)).chat_template
    ours, theirs = (load_base(path, torch.device("cpu")) for path in (folder, Path(base.path)))
    moved = [name for name, tensor in ours.named_parameters() if not torch.equal(tensor, theirs.get_parameter(name))]
    assert {name for name, _ in theirs.named_parameters()} == set(moved), "every weight is trained"
    _, scores = evaluate_here(
        an_evaluate_spec(tmp_path, base, small_rows(20), adapter_ref(tmp_path / "out", result)), tmp_path / "scored"
    )
    candidate, baseline = (scores.by_subject[label] for label in ("candidate", "baseline"))
    assert sum(one.values["heldout_loss"] for one in candidate) < sum(one.values["heldout_loss"] for one in baseline)


def test_full_tuning_resumes_to_the_bit_and_goes_on_from_its_own_version(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    often = {"checkpoints": Checkpoints(every_steps=1, keep=100), "expected_artifact": "model"}
    spec = a_train_spec(base, data, recipe=a_recipe(**FULL), **often)
    first = train_here(spec, tmp_path / "straight")
    train_here(spec.model_copy(update={"resume": resume_from(tmp_path / "straight", 5)}), tmp_path / "resumed")
    steps = losses_of(tmp_path / "straight")
    assert losses_of(tmp_path / "resumed") == {step: loss for step, loss in steps.items() if step > 5}
    one, two = (sha256_file(tmp_path / name / "artifact" / "model.safetensors") for name in ("straight", "resumed"))
    assert one == two
    start = adapter_ref(tmp_path / "straight", first)
    again = a_train_spec(base, data, recipe=a_recipe(**FULL), start=start, **often)
    train_here(again, tmp_path / "again")
    assert losses_of(tmp_path / "again")[1] < steps[1]
    lora = a_train_spec(base, data, recipe=a_recipe(), start=start)
    with pytest.raises(ConfigError, match="fully tuned model; start from the base"):
        train_here(lora, tmp_path / "lora")


def test_adapter_in_place_of_a_model_is_not_believed(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    result = train_here(a_train_spec(base, data, recipe=a_recipe(max_steps=2)), tmp_path / "out")
    [(error_class, message), *_] = adapter_problems(tmp_path / "out", result.artifact, None, "model")
    assert (error_class, message) == (ErrorClass.MISMATCH, "artifact: config.json is missing")


def test_full_tuning_has_a_gentler_default_rate() -> None:
    assert Recipe(tuning="full", method="sft").peak_lr == pytest.approx(2e-5)
    assert Recipe(method="sft").peak_lr == pytest.approx(2e-4)
