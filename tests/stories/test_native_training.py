"""The native trainer on real models: it learns, it resumes to the bit, it ends as it is told, and it refuses lies.

Most run inside the test's process on a model of ten thousand random weights; the last ones are real processes.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

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
    losses_of,
    quick_base,
    resume_from,
    rows_of,
    small_rows,
    train_here,
    weights_of,
)
from support.programs import finish, wait_until
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.core.files import publish_folder, read_manifest, verify_folder
from tunesmith.datasets.reading import read_split
from tunesmith.demo import dates
from tunesmith.models.adapters import new_adapter, save_adapter
from tunesmith.models.loading import load_base, load_tokenizer, pick_device
from tunesmith.profiles.profile import Budgets, Checkpoints, Validation
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.launch import RunningProgram, launch
from tunesmith.programs.protocol import Ack, CheckpointEvent, Log, Metrics, ResultStatus, ValidationEvent
from tunesmith.programs.result_check import check_train_result
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import BaseModelRef, DatasetRef, TrainSpec
from tunesmith.training.trainers.native.checkpoints import copy_state
from tunesmith.training.trainers.native.state import TrainerState, check_restored, state_of
from tunesmith.training.trainers.native.train import train
from tunesmith.training.trainers.registry import find_trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("native") / "base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("native") / "data", small_rows(60), validation_share=0.2)


def every_step(**changes: Any) -> dict[str, Any]:
    return {"checkpoints": Checkpoints(every_steps=1, keep=1000), **changes}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, base: BaseModelRef, data: DatasetRef) -> tuple[TrainSpec, Path]:
    """A training that nothing interrupted, with every checkpoint kept: dropout, embeddings, several epochs."""
    recipe = a_recipe(lora_dropout=0.1, train_embeddings=True, epochs=2.5)
    spec = a_train_spec(base, data, recipe=recipe, **every_step())
    folder = tmp_path_factory.mktemp("straight") / "out"
    result = train_here(spec, folder)
    assert result.status is ResultStatus.SUCCEEDED
    return spec, folder


def again(spec: TrainSpec, **changes: Any) -> TrainSpec:
    return spec.model_copy(update=changes)


# ---- resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.8, 1.0])
def test_resumed_training_equals_one_never_stopped(
    straight: tuple[TrainSpec, Path], tmp_path: Path, share: float
) -> None:
    spec, folder = straight
    steps = losses_of(folder)
    killed_at = max(1, round(share * len(steps)))
    source = resume_from(folder, killed_at)
    shutil.copytree(source.path, tmp_path / "checkpoint")
    resumed = again(spec, resume=source.model_copy(update={"path": str(tmp_path / "checkpoint")}))
    result = train_here(resumed, tmp_path / "out")
    assert losses_of(tmp_path / "out") == {step: loss for step, loss in steps.items() if step > killed_at}
    assert weights_of(tmp_path / "out") == weights_of(folder)
    assert result.num_steps == len(steps)
    assert values_of(tmp_path / "out") == [found for found in values_of(folder) if found[0] > killed_at]


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_killed_at_every_step_equals_one_never_stopped(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path, seed: int
) -> None:
    recipe = a_recipe(lora_dropout=0.1, train_embeddings=True, epochs=100, max_steps=40, seed=seed)
    spec = a_train_spec(base, data, recipe=recipe, **every_step())
    train_here(spec, tmp_path / "straight")
    steps = losses_of(tmp_path / "straight")
    for killed_at in range(1, 40):
        folder = tmp_path / f"from-{killed_at}"
        train_here(again(spec, resume=resume_from(tmp_path / "straight", killed_at)), folder)
        assert losses_of(folder) == {step: loss for step, loss in steps.items() if step > killed_at}
        assert weights_of(folder) == weights_of(tmp_path / "straight")
        shutil.rmtree(folder)


def values_of(folder: Path) -> list[tuple[int, float, bool]]:
    return [
        (event.step, event.values["validation_loss"], event.is_best)
        for event in events_of(folder)
        if isinstance(event, ValidationEvent)
    ]


def test_term_in_the_middle_of_a_validation_loses_nothing(
    base: BaseModelRef, data: DatasetRef, straight: tuple[TrainSpec, Path], tmp_path: Path
) -> None:
    spec, folder = straight
    program = a_program(spec, tmp_path / "first")
    usual = program.progress

    def progress(done: int, total: int, unit: str = "step") -> None:
        usual(done, total, unit)
        if unit == "case" and 8 in losses_of(tmp_path / "first"):
            program.terminating = True  # as the TERM handler would, between two batches

    program.progress = progress  # type: ignore[method-assign]
    result = train(program)
    assert (result.status, result.detail["reason"], result.num_steps) == (ResultStatus.INTERRUPTED, "terminated", 8)
    assert all(step < 8 for step, _, _ in values_of(tmp_path / "first"))
    train_here(again(spec, resume=resume_from(tmp_path / "first", 8)), tmp_path / "second")
    assert values_of(tmp_path / "second") == [found for found in values_of(folder) if found[0] >= 8]
    assert weights_of(tmp_path / "second") == weights_of(folder)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("recipe.lr", {"recipe": a_recipe(lora_dropout=0.1, train_embeddings=True, epochs=2.5, lr=1e-3)}),
        ("recipe.seed", {"recipe": a_recipe(lora_dropout=0.1, train_embeddings=True, epochs=2.5, seed=2)}),
        ("run_id", {"run_id": "run-2"}),
        ("validation.best_direction", {"validation": Validation(every_steps=4, max_cases=10, best_direction="higher")}),
    ],
)
def test_checkpoint_of_another_training_is_refused_by_field(
    straight: tuple[TrainSpec, Path], tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    spec, folder = straight
    other = again(spec, run=spec.run.model_copy(update=change), resume=resume_from(folder, 3))
    with pytest.raises(DataError, match=field):
        train_here(other, tmp_path / "out")


def test_checkpoint_of_another_dataset_is_refused_by_field(straight: tuple[TrainSpec, Path], tmp_path: Path) -> None:
    spec, folder = straight
    other = a_dataset(tmp_path / "other", small_rows(50), validation_share=0.2)
    run = spec.run.model_copy(update={"dataset": other})
    with pytest.raises(DataError, match=r"dataset\.fingerprint"):
        train_here(again(spec, run=run, resume=resume_from(folder, 3)), tmp_path / "out")


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "adapter/adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_damaged_checkpoint_is_refused(
    straight: tuple[TrainSpec, Path], tmp_path: Path, name: str, damage: str
) -> None:
    spec, folder = straight
    source = resume_from(folder, 3)
    copy = tmp_path / "checkpoint"
    shutil.copytree(source.path, copy)
    content = (copy / name).read_bytes()
    if damage == "delete":
        (copy / name).unlink()
    elif damage == "cut":
        (copy / name).write_bytes(content[: len(content) // 2])
    else:
        (copy / name).write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(ProgramFailure, match=f"{name}.*resumes from an earlier one") as refusal:
        train_here(again(spec, resume=source.model_copy(update={"path": str(copy)})), tmp_path / "out")
    assert refusal.value.error_class is ErrorClass.TRANSIENT  # tried again: the worker steps over a damaged one


def test_checkpoints_hold_no_pickle(straight: tuple[TrainSpec, Path]) -> None:
    _, folder = straight
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jsonl", ".safetensors", ".jinja"}


# ---- when and what is saved -----------------------------------------------------------------------------------------


def saves_of(folder: Path) -> dict[int, tuple[str, ...]]:
    return {event.step: event.kinds for event in events_of(folder) if isinstance(event, CheckpointEvent)}


def test_checkpoints_by_epochs_are_written_at_their_ends(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    rhythm = Checkpoints(every_steps=None, every_epochs=2, keep=100)
    recipe = a_recipe(epochs=5)
    quiet = Validation(every_steps=10_000, max_cases=2)
    spec = a_train_spec(base, data, recipe=recipe, checkpoints=rhythm, validation=quiet)
    result = train_here(spec, tmp_path / "out")
    per_epoch = result.num_steps // 5
    assert per_epoch > 1
    assert list(saves_of(tmp_path / "out")) == [2 * per_epoch, 4 * per_epoch, result.num_steps]


def test_checkpoints_by_the_clock_change_nothing_that_is_learnt(
    straight: tuple[TrainSpec, Path], tmp_path: Path
) -> None:
    """Resume from one of them, too: a clock decides when to save, never what."""
    spec, folder = straight
    rhythm = Checkpoints(every_steps=None, every_minutes=0.0001, keep=1000)
    clocked = again(spec, run=spec.run.model_copy(update={"checkpoints": rhythm}))
    train_here(clocked, tmp_path / "out")
    assert losses_of(tmp_path / "out") == losses_of(folder)
    assert weights_of(tmp_path / "out") == weights_of(folder)
    numbered = [step for step, kinds in saves_of(tmp_path / "out").items() if "step" in kinds]
    assert len(numbered) > 3
    train_here(again(clocked, resume=resume_from(tmp_path / "out", numbered[1])), tmp_path / "second")
    assert weights_of(tmp_path / "second") == weights_of(folder)


def test_state_names_everything_that_a_resume_needs(straight: tuple[TrainSpec, Path]) -> None:
    _, folder = straight
    source = Path(resume_from(folder, 5).path)
    state = json.loads((source / "state.json").read_bytes())
    standing = state["standing"]
    assert (standing["step"], state["accumulation"], state["scaler"]) == (5, 0, None)
    assert standing["last_loss"] == losses_of(folder)[5]
    assert standing["last_lr"] > 0
    assert min(standing["num_tokens"], standing["num_trained_tokens"], standing["num_seen"], standing["train_s"]) > 0
    assert (standing["best_step"], standing["validated_step"]) == (4, 4)
    assert {"epoch", "position", "libraries"} <= state.keys()
    assert set(state["random"]["rank-0"]) == {"python", "numpy"}
    assert state["identity"]["world_size"] == 1
    names = load_file(source / "state.safetensors").keys()
    assert {name.partition("/")[0] for name in names} == {"step", "exp_avg", "exp_avg_sq", "rank-0"}


def test_adapter_in_a_checkpoint_has_the_bytes_that_save_adapter_writes(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    model = load_base(Path(base.path), pick_device())
    adapted = new_adapter(model, a_recipe(train_embeddings=True))
    save_adapter(adapted, tmp_path / "one", "base")
    state = state_of(a_train_spec(base, data).run, TrainerState(), 0, 0, {})
    (tmp_path / "two").mkdir()
    copy_state(state, adapted, {}, Path("base")).write(tmp_path / "two")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "two" / "adapter" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_weights_in_memory_that_are_not_the_checkpoints_are_noticed(straight: tuple[TrainSpec, Path]) -> None:
    """A fresh adapter wrapped over the loaded one would train from zero, in silence."""
    folder = Path(resume_from(straight[1], 3).path)
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    check_restored(folder, weights)
    name = sorted(weights)[0]
    for odd in ({name: -weights[name]}, {name: weights[name].double()}, {f"more.{name}": weights[name]}):
        with pytest.raises(ProgramFailure, match=name) as failure:
            check_restored(folder, weights | odd)
        assert failure.value.error_class is ErrorClass.BUG


def test_loss_that_jumps_after_a_resume_is_told(straight: tuple[TrainSpec, Path], tmp_path: Path) -> None:
    spec, folder = straight
    source = resume_from(folder, 3)
    copy = tmp_path / "step-3"
    shutil.copytree(source.path, copy)
    state = json.loads((copy / "state.json").read_bytes())
    state["standing"]["last_loss"] = 0.01
    (copy / "state.json").write_text(json.dumps(state))
    meta = read_manifest(copy).meta
    (copy / "manifest.json").unlink()
    digest = publish_folder(copy, tmp_path / "checkpoints" / "step-3", meta).digest
    changed = source.model_copy(update={"path": str(tmp_path / "checkpoints" / "step-3"), "digest": digest})
    train_here(again(spec, resume=changed), tmp_path / "out")
    assert [log.message for log in logs_of(tmp_path / "out") if "the loss jumped from 0.01" in log.message]
    train_here(again(spec, resume=source), tmp_path / "other")
    assert not [log for log in logs_of(tmp_path / "other") if "jumped" in log.message]


def test_step_saved_twice_never_takes_the_place_of_the_first(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    """Saved by its number, then again as the best, when the token budget ended the training there."""
    quiet = Validation(every_steps=10_000, max_cases=2)
    first = train_here(endless(base, data, budgets=Budgets(tokens=1000), validation=quiet), tmp_path / "first")
    rhythm = Checkpoints(every_steps=first.num_steps)
    spec = endless(base, data, budgets=Budgets(tokens=1000), validation=quiet, checkpoints=rhythm)
    result = train_here(spec, tmp_path / "out")
    saved = [event for event in events_of(tmp_path / "out") if isinstance(event, CheckpointEvent)]
    assert [event.step for event in saved] == [result.num_steps] * 2
    assert [event.path for event in saved] == [f"step-{result.num_steps}", f"step-{result.num_steps}-2"]
    for event in saved:
        verify_folder(tmp_path / "out" / "checkpoints" / event.path, event.digest)


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def test_loss_and_weights_do_not_depend_on_micro_batches(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    recipe = a_recipe(lora_dropout=0.0, max_steps=6, micro_batch_tokens=4096)
    runs = []
    for number, divisor in enumerate((1, 32, 4096)):
        train_here(a_train_spec(base, data, recipe=recipe, divisor=divisor), tmp_path / str(number))
        runs.append(losses_of(tmp_path / str(number)))
    for other in runs[1:]:
        assert list(other.values()) == pytest.approx(list(runs[0].values()), rel=1e-4)


def test_metrics_of_every_step_are_complete(straight: tuple[TrainSpec, Path]) -> None:
    _, folder = straight
    metrics = [event for event in events_of(folder) if isinstance(event, Metrics)]
    assert [event.step for event in metrics] == list(range(1, len(metrics) + 1))
    names = {"loss", "grad_norm", "lr", "tokens", "tokens_per_s", "memory_mb", "update_ratio", "save_s", "write_s"}
    assert all(set(event.values) >= names for event in metrics)
    assert metrics[-1].values["loss"] < metrics[0].values["loss"]


def test_validations_show_samples_norms_and_the_best(straight: tuple[TrainSpec, Path]) -> None:
    _, folder = straight
    validations = [event for event in events_of(folder) if isinstance(event, ValidationEvent)]
    assert validations[0].step == 0
    assert not validations[0].is_best
    assert len(validations[0].samples) == 4
    assert len(validations[-1].adapter_norms) == 14
    assert any(event.is_best for event in validations)


def test_best_and_last_and_the_newest_numbered_checkpoints_are_kept(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    spec = a_train_spec(
        base,
        data,
        recipe=a_recipe(epochs=3),
        checkpoints=Checkpoints(every_steps=2, keep=2),
        validation=Validation(every_steps=1, max_cases=4, best_direction="higher"),  # so that an early step is the best
    )
    result = train_here(spec, tmp_path / "out")
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert result.best_step is not None
    assert result.best_step < result.num_steps - 6  # the loss fell, and the direction was declared the other way
    newest = list(range(2, result.num_steps, 2))[-2:]
    assert kept == sorted({result.best_step, result.num_steps, *newest})
    for step in kept:
        verify_folder(tmp_path / "out" / "checkpoints" / f"step-{step}")
    best = tmp_path / "out" / "checkpoints" / f"step-{result.best_step}" / "adapter" / "adapter_model.safetensors"
    assert best.read_bytes() == (tmp_path / "out" / "artifact" / "adapter_model.safetensors").read_bytes()


def test_without_validation_split_the_last_step_is_the_best(base: BaseModelRef, tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "data", small_rows(40), validation_share=0.0)
    result = train_here(a_train_spec(base, data), tmp_path / "out")
    assert result.best_step == result.num_steps
    assert any("no validation examples" in event.message for event in logs_of(tmp_path / "out"))
    last = next(event for event in reversed(events_of(tmp_path / "out")) if isinstance(event, CheckpointEvent))
    assert set(last.kinds) >= {"best", "last"}


def logs_of(folder: Path) -> list[Log]:
    return [event for event in events_of(folder) if isinstance(event, Log)]


def test_packed_and_padded_trainings_follow_the_same_losses(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    for packing in (True, False):
        recipe = a_recipe(packing=packing, lora_dropout=0.0, max_steps=6)
        train_here(a_train_spec(base, data, recipe=recipe), tmp_path / str(packing))
    assert losses_of(tmp_path / "True") == pytest.approx(losses_of(tmp_path / "False"), rel=1e-4)


# ---- data that does not fit -----------------------------------------------------------------------------------------


def test_too_long_examples_are_dropped_whole_and_counted(base: BaseModelRef, tmp_path: Path) -> None:
    long = rows_of((f"long {number}", "word " * 80) for number in range(20))
    data = a_dataset(tmp_path / "data", [*small_rows(40), *long])
    result = train_here(a_train_spec(base, data, recipe=a_recipe(max_length=100, epochs=1)), tmp_path / "out")
    too_long = [example for example in read_split(tmp_path / "data", "train") if "long" in example.prompt[0]["content"]]
    assert result.num_dropped_examples == len(too_long) > 0
    assert result.num_trained_examples + result.num_dropped_examples == data.num_train


def test_dataset_in_which_nothing_fits_is_refused(base: BaseModelRef, tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "data", rows_of((f"long {number}", "word " * 80) for number in range(40)))
    with pytest.raises(DataError, match=r"raise recipe\.max_length"):
        train_here(a_train_spec(base, data, recipe=a_recipe(max_length=100)), tmp_path / "out")


def test_dataset_that_was_swapped_is_refused(base: BaseModelRef, tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "data", small_rows(40))
    other = a_dataset(tmp_path / "other", small_rows(41))
    shutil.rmtree(data.path)
    shutil.copytree(other.path, data.path)
    with pytest.raises(ProgramFailure, match="fingerprint") as refusal:
        train_here(a_train_spec(base, data), tmp_path / "out")
    assert refusal.value.error_class is ErrorClass.DATA


def test_what_the_trainer_cannot_do_is_refused_by_field(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    for number, (field, change) in enumerate(
        {
            r"recipe\.method": {"method": "dpo"},
            r"trainer\.options": {"trainer_options": {"speed": 9}},
            r"validation\.best_metric": {"validation": Validation(best_metric="bleu")},
            r"recipe\.target_modules": {"recipe": a_recipe(target_modules=("c_attn",))},
            r"budgets\.tokens": {"budgets": Budgets(tokens=10)},
        }.items()
    ):
        with pytest.raises((ConfigError, DataError, ProgramFailure), match=field):
            train_here(a_train_spec(base, data, **change), tmp_path / str(number))


# ---- broken numbers -------------------------------------------------------------------------------------------------


def test_nan_in_the_base_is_found_before_the_first_step(data: DatasetRef, tmp_path: Path) -> None:
    broken = a_base_ref(a_micro_base(tmp_path / "base", nan_in="model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(ProgramFailure, match=r"loss on example [0-9a-f]{64} is not a finite number") as failure:
        train_here(a_train_spec(broken, data), tmp_path / "out")
    assert failure.value.error_class is ErrorClass.NONFINITE
    assert losses_of(tmp_path / "out") == {}


def test_nan_ends_the_training_and_names_step_and_examples(tmp_path: Path) -> None:
    """One symbol is broken in the base, and only one example of many holds it: no sample taken before finds it."""
    import torch

    folder = a_micro_base(tmp_path / "base", tied=False)
    model = load_base(folder, torch.device("cpu"))
    model.model.embed_tokens.weight.data[load_tokenizer(folder)("Z", add_special_tokens=False).input_ids[0]] = math.nan
    model.save_pretrained(folder)
    rows = rows_of([*((f"say {number}", "yes") for number in range(300)), ("say Z", "no")])
    data = a_dataset(tmp_path / "data", rows, heldout_share=0.01, validation_share=0.0)
    [bad] = [one.id for one in read_split(tmp_path / "data", "train") if "Z" in one.prompt[0]["content"]]
    with pytest.raises(ProgramFailure, match=rf"loss is nan at step \d+; examples: {bad};") as failure:
        train_here(a_train_spec(a_base_ref(folder), data, recipe=a_recipe(epochs=1, seed=5)), tmp_path / "out")
    assert failure.value.error_class is ErrorClass.NONFINITE
    assert not math.isfinite(list(losses_of(tmp_path / "out").values())[-1])
    assert not (tmp_path / "out" / "artifact").exists()


def test_divergence_keeps_the_last_good_checkpoint(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    recipe = a_recipe(lr=1.0, max_grad_norm=1e6, epochs=200, warmup=0.95, weight_decay=0.0, lora_dropout=0.0)
    overflows = recipe.model_copy(update={"lora_alpha": 1e17})  # more than a profile may say
    spec = a_train_spec(base, data, recipe=overflows, **every_step())
    with pytest.raises(ProgramFailure) as failure:
        train_here(spec, tmp_path / "out")
    assert failure.value.error_class is ErrorClass.NONFINITE
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-1"]
    verify_folder(tmp_path / "out" / "checkpoints" / "step-1")


# ---- starting from an adapter ---------------------------------------------------------------------------------------


def test_training_goes_on_from_an_adapter(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    first = train_here(a_train_spec(base, data, recipe=a_recipe(epochs=4)), tmp_path / "first")
    start = adapter_ref(tmp_path / "first", first)
    second = train_here(a_train_spec(base, data, start=start, run_id="run-2"), tmp_path / "second")
    assert second.start_digest == start.digest
    assert losses_of(tmp_path / "second")[1] < losses_of(tmp_path / "first")[1]
    assert weights_of(tmp_path / "second") != weights_of(tmp_path / "first")


def test_start_of_another_shape_is_refused_by_field(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    first = train_here(a_train_spec(base, data, recipe=a_recipe(max_steps=2)), tmp_path / "first")
    start = adapter_ref(tmp_path / "first", first)
    with pytest.raises(ConfigError, match=r"recipe\.lora_rank is 8.*has 4"):
        train_here(a_train_spec(base, data, recipe=a_recipe(lora_rank=8), start=start), tmp_path / "second")


# ---- endings --------------------------------------------------------------------------------------------------------


def endless(base: BaseModelRef, data: DatasetRef, **changes: Any) -> TrainSpec:
    slow = {"validation": Validation(every_steps=1000), "checkpoints": Checkpoints(every_steps=10_000)}
    return a_train_spec(base, data, recipe=a_recipe(epochs=1000), **(slow | changes))


def train_with(spec: TrainSpec, folder: Path, act: Callable[[Program], None], after_step: int = 3) -> Any:
    """Train here, and do something from outside once that many steps are made."""
    program = a_program(spec, folder)

    def watch() -> None:
        deadline = time.monotonic() + 60
        while len(losses_of(folder)) < after_step and time.monotonic() < deadline:
            time.sleep(0.02)
        act(program)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return train(program)
    finally:
        watcher.join()


def send_requests(*kinds: RequestKind) -> Callable[[Program], None]:
    lines = "".join(json.dumps({"id": f"req-{kind.value}", "kind": kind.value}) + "\n" for kind in kinds)

    def act(program: Program) -> None:
        with (program.dir / "control.jsonl").open("a") as control:
            control.write(lines)

    return act


def acks_of(folder: Path) -> dict[str, str]:
    return {event.request_id: event.detail for event in events_of(folder) if isinstance(event, Ack)}


def checkpoints_of(folder: Path) -> list[int]:
    return [event.step for event in events_of(folder) if isinstance(event, CheckpointEvent)]


def test_pause_saves_a_checkpoint_then_answers(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    result = train_with(endless(base, data), tmp_path / "out", send_requests(RequestKind.PAUSE))
    assert (result.status, result.detail["reason"]) == (ResultStatus.INTERRUPTED, "pause")
    assert checkpoints_of(tmp_path / "out") == [result.num_steps]
    assert acks_of(tmp_path / "out") == {"req-pause": f"at step {result.num_steps}"}
    kinds = [event.type for event in events_of(tmp_path / "out")]
    assert kinds.index("checkpoint") < kinds.index("ack")


def test_stop_ends_with_the_best_so_far(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    spec = endless(base, data, validation=Validation(every_steps=2, max_cases=5))
    result = train_with(spec, tmp_path / "out", send_requests(RequestKind.STOP))
    assert result.status is ResultStatus.STOPPED
    assert result.best_step is not None
    verify_folder(tmp_path / "out" / "artifact", result.artifact.digest)
    assert list(acks_of(tmp_path / "out")) == ["req-stop"]


def test_stop_before_any_validation_still_has_a_result(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    result = train_with(endless(base, data), tmp_path / "out", send_requests(RequestKind.STOP), after_step=1)
    assert result.status is ResultStatus.STOPPED
    assert result.best_step == result.num_steps


def test_stop_before_the_first_step_waits_for_one(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    program = a_program(endless(base, data), tmp_path / "out")
    send_requests(RequestKind.STOP)(program)
    result = train(program)
    assert (result.status, result.num_steps) == (ResultStatus.STOPPED, 1)
    assert result.artifact is not None


def test_stop_wins_over_pause(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    result = train_with(endless(base, data), tmp_path / "out", send_requests(RequestKind.PAUSE, RequestKind.STOP))
    assert result.status is ResultStatus.STOPPED
    assert acks_of(tmp_path / "out")["req-pause"] == "overtaken: stop"


def test_cancel_keeps_nothing(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    result = train_with(endless(base, data), tmp_path / "out", send_requests(RequestKind.CANCEL, RequestKind.STOP))
    assert (result.status, result.detail["reason"]) == (ResultStatus.INTERRUPTED, "cancel")
    assert checkpoints_of(tmp_path / "out") == []
    assert result.artifact is None


def test_checkpoint_wish_is_fulfilled_and_training_goes_on(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    def act(program: Program) -> None:
        send_requests(RequestKind.CHECKPOINT, RequestKind.SKIP)(program)
        while "req-checkpoint" not in acks_of(program.dir):
            time.sleep(0.02)
        send_requests(RequestKind.STOP)(program)

    result = train_with(endless(base, data), tmp_path / "out", act)
    answers = acks_of(tmp_path / "out")
    assert answers["req-checkpoint"] == f"step-{checkpoints_of(tmp_path / 'out')[0]}"
    assert "use stop or cancel" in answers["req-skip"]
    assert result.num_steps >= checkpoints_of(tmp_path / "out")[0]


def test_time_budget_ends_the_training_with_a_result(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    spec = endless(base, data, budgets=Budgets(wall_s=102.0), spent_wall_s=100.0)
    result = train_here(spec, tmp_path / "out")
    assert (result.status, result.detail["budget"]) == (ResultStatus.SUCCEEDED, "wall")
    assert 0 < result.num_steps < 1000
    assert result.artifact is not None


def test_token_budget_ends_the_training_before_it_is_passed(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    result = train_here(endless(base, data, budgets=Budgets(tokens=1000)), tmp_path / "out")
    assert (result.status, result.detail["budget"]) == (ResultStatus.SUCCEEDED, "tokens")
    assert 700 < result.detail["num_tokens"] <= 1000
    assert result.best_step == result.num_steps


# ---- real processes -------------------------------------------------------------------------------------------------


def start(spec: TrainSpec, folder: Path) -> RunningProgram:
    return launch(find_trainer("native").argv, spec, folder)


def test_process_terminated_and_resumed_equals_the_one_never_stopped(
    straight: tuple[TrainSpec, Path], tmp_path: Path
) -> None:
    """TERM → checkpoint → exit 75 → another process goes on; the adapter has the same bytes, hash seeds or not."""
    spec, folder = straight
    first = start(spec, tmp_path / "first")
    wait_until(
        lambda: 2 in losses_of(tmp_path / "first") if (tmp_path / "first" / "events.jsonl").exists() else None, 90
    )
    first.terminate()
    code = finish(first, 60)
    done = losses_of(tmp_path / "first")
    if code == 75:
        assert check_train_result(spec, tmp_path / "first", code).outcome is AttemptState.INTERRUPTED
    else:  # so quick that TERM came after the last step
        assert (code, len(done)) == (0, len(losses_of(folder)))
    second = again(spec, resume=resume_from(tmp_path / "first", max(done)))
    code = finish(start(second, tmp_path / "second"), 90)
    assert code == 0
    judged = check_train_result(second, tmp_path / "second", code)
    assert (judged.outcome, judged.error) == (AttemptState.SUCCEEDED, None)
    assert weights_of(tmp_path / "second") == weights_of(folder)
    config = "artifact/adapter_config.json"
    assert (tmp_path / "second" / config).read_bytes() == (folder / config).read_bytes()


def test_process_with_a_broken_base_fails_as_nonfinite(data: DatasetRef, tmp_path: Path) -> None:
    broken = a_base_ref(a_micro_base(tmp_path / "base", nan_in="model.norm.weight"))
    spec = a_train_spec(broken, data)
    code = finish(start(spec, tmp_path / "out"), 90)
    judged = check_train_result(spec, tmp_path / "out", code)
    assert (code, judged.outcome, judged.error_class) == (1, AttemptState.FAILED, ErrorClass.NONFINITE)


# ---- real learning --------------------------------------------------------------------------------------------------


def mean_loss(scores: Any, label: str) -> float:
    values = [score.values["heldout_loss"] for score in scores.by_subject[label]]
    return sum(values) / len(values)


def test_good_data_helps_and_shuffled_answers_harm(tmp_path: Path) -> None:
    """On cases that neither the base nor the adapter was trained on."""
    base = a_base_ref(quick_base())
    recipe = a_recipe(
        lr=5e-3,
        epochs=100,
        max_steps=40,
        batch_tokens=1536,
        micro_batch_tokens=4096,
        lora_rank=16,
        train_embeddings=True,
    )
    rare = {"validation": Validation(every_steps=20, max_cases=20), "checkpoints": Checkpoints(every_steps=100)}
    rows = dates.mixed_rows(500, seed=7)
    known = {row["messages"][0]["content"] for row in rows}
    held_out = [row for row in dates.mixed_rows(150, seed=99) if row["messages"][0]["content"] not in known]
    good_data = a_dataset(tmp_path / "good", rows)
    good = train_here(a_train_spec(base, good_data, recipe=recipe, **rare), tmp_path / "a")
    spec = an_evaluate_spec(tmp_path, base, held_out, adapter_ref(tmp_path / "a", good))
    _, scores = evaluate_here(spec, tmp_path / "e1")
    assert mean_loss(scores, "candidate") < 0.2 * mean_loss(scores, "baseline")

    old = [row for row in held_out if not row["messages"][1]["content"].startswith("{")]
    bad_data = a_dataset(tmp_path / "bad", dates.shuffled_answers(rows, seed=8))
    bad = train_here(a_train_spec(base, bad_data, recipe=recipe, **rare), tmp_path / "b")
    spec = an_evaluate_spec(tmp_path, base, old, adapter_ref(tmp_path / "b", bad))
    _, worse = evaluate_here(spec, tmp_path / "e2")
    assert mean_loss(worse, "candidate") > 5 * mean_loss(worse, "baseline")
