"""Every method of the native trainer, really trained on a tiny base: it learns, tells, and resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_recipe,
    a_train_spec,
    adapter_ref,
    events_of,
    labelled_rows,
    losses_of,
    pair_rows,
    resume_from,
    train_here,
    weights_of,
)
from tunesmith.core.errors import ConfigError
from tunesmith.profiles.profile import Checkpoints, Method, Validation
from tunesmith.programs.protocol import Metrics, ResultStatus, ValidationEvent
from tunesmith.runs.spec import BaseModelRef, DatasetRef, TrainSpec

CASES = {
    "dpo": (Method.DPO, "pairs"),
    "orpo": (Method.ORPO, "pairs"),
    "kto on pairs": (Method.KTO, "pairs"),
    "kto on labels": (Method.KTO, "labels"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("methods") / "base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DatasetRef]:
    folder = tmp_path_factory.mktemp("methods")
    return {
        "pairs": a_dataset(folder / "pairs", pair_rows(80), validation_share=0.2),
        "labels": a_dataset(folder / "labels", labelled_rows(80), validation_share=0.2),
    }


def a_spec(base: BaseModelRef, data: dict[str, DatasetRef], case: str, **changes: Any) -> TrainSpec:
    method, kind = CASES[case]
    recipe = a_recipe(**({"method": method, "lr": 1e-2, "batch_tokens": 600, "epochs": 6} | changes.pop("recipe", {})))
    rare = {"checkpoints": Checkpoints(every_steps=100), "validation": Validation(every_steps=5)}
    return a_train_spec(base, data[kind], method=method, recipe=recipe, **(rare | changes))


def validations(folder: Path) -> list[ValidationEvent]:
    return [event for event in events_of(folder) if isinstance(event, ValidationEvent)]


@pytest.mark.parametrize("case", CASES)
def test_method_learns_to_tell_good_from_bad(
    base: BaseModelRef, data: dict[str, DatasetRef], tmp_path: Path, case: str
) -> None:
    result = train_here(a_spec(base, data, case), tmp_path / "out")
    assert result.status is ResultStatus.SUCCEEDED
    first, *_, last = validations(tmp_path / "out")
    assert last.values["validation_loss"] < first.values["validation_loss"]
    assert last.values["validation_reward_accuracy"] >= max(0.65, first.values["validation_reward_accuracy"])
    step = next(event for event in events_of(tmp_path / "out") if isinstance(event, Metrics))
    assert {"reward_accuracy", "data_s", "forward_s", "backward_s", "optimizer_s", "save_s"} <= set(step.values)
    if case != "orpo":  # the policy is the reference at first
        expected = {"dpo": 0.6931, "kto on pairs": 0.5, "kto on labels": 0.5}[case]
        assert first.values["validation_loss"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_method_resumed_equals_never_stopped(
    base: BaseModelRef, data: dict[str, DatasetRef], tmp_path: Path, case: str
) -> None:
    recipe = {"lora_dropout": 0.1, "max_steps": 7, "micro_batch_tokens": 150}
    spec = a_spec(base, data, case, recipe=recipe, checkpoints=Checkpoints(every_steps=1, keep=1000))
    train_here(spec, tmp_path / "straight")
    steps = losses_of(tmp_path / "straight")
    resumed = spec.model_copy(update={"resume": resume_from(tmp_path / "straight", 4)})
    train_here(resumed, tmp_path / "resumed")
    assert losses_of(tmp_path / "resumed") == {step: loss for step, loss in steps.items() if step > 4}
    assert weights_of(tmp_path / "resumed") == weights_of(tmp_path / "straight")


@pytest.mark.parametrize("case", CASES)
def test_method_gives_the_same_losses_packed_and_padded(
    base: BaseModelRef, data: dict[str, DatasetRef], tmp_path: Path, case: str
) -> None:
    for packing in (True, False):
        recipe = {"packing": packing, "lora_dropout": 0.0, "max_steps": 4}
        train_here(a_spec(base, data, case, recipe=recipe), tmp_path / str(packing))
    assert losses_of(tmp_path / "True") == pytest.approx(losses_of(tmp_path / "False"), rel=1e-3)


def test_dpo_from_an_adapter_takes_that_adapter_as_its_reference(
    base: BaseModelRef, data: dict[str, DatasetRef], tmp_path: Path
) -> None:
    first = train_here(a_spec(base, data, "dpo", recipe={"epochs": 2}), tmp_path / "first")
    start = adapter_ref(tmp_path / "first", first)
    spec = a_spec(base, data, "dpo", start=start, recipe={"max_steps": 2, "lora_dropout": 0.0})
    train_here(spec, tmp_path / "second")
    assert losses_of(tmp_path / "second")[1] == pytest.approx(0.6931, abs=1e-3)
    assert weights_of(tmp_path / "second") != weights_of(tmp_path / "first")


def test_best_may_be_declared_by_accuracy(base: BaseModelRef, data: dict[str, DatasetRef], tmp_path: Path) -> None:
    policy = Validation(every_steps=2, best_metric="validation_reward_accuracy", best_direction="higher")
    result = train_here(a_spec(base, data, "dpo", validation=policy), tmp_path / "out")
    best = max(
        (event for event in validations(tmp_path / "out") if event.step > 0),
        key=lambda event: (event.values["validation_reward_accuracy"], -event.step),
    )
    assert result.best_step == best.step
    assert result.metrics["validation_reward_accuracy"] == best.values["validation_reward_accuracy"]


def test_metric_that_the_method_does_not_measure_is_refused(
    base: BaseModelRef, data: dict[str, DatasetRef], tmp_path: Path
) -> None:
    spec = a_spec(base, data, "dpo", validation=Validation(best_metric="accuracy"))
    with pytest.raises(ConfigError, match="validation_reward_accuracy"):
        train_here(spec, tmp_path / "out")


def test_pair_with_one_answer_too_long_is_dropped_whole(base: BaseModelRef, tmp_path: Path) -> None:
    long = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no " * 60} for n in range(30)]
    data = {"pairs": a_dataset(tmp_path / "data", [*pair_rows(60), *long])}
    result = train_here(a_spec(base, data, "orpo", recipe={"max_length": 100, "epochs": 1}), tmp_path / "out")
    assert result.num_dropped_examples > 10
    assert result.num_trained_examples + result.num_dropped_examples == data["pairs"].num_train
