"""The trl trainer where things go wrong, or could quietly: NaN, cut answers, pickles, other losses, a resume."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.native import (
    Row,
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_program,
    a_recipe,
    a_train_spec,
    adapter_ref,
    an_attempt,
    events_of,
    losses_of,
    resume_from,
    small_rows,
    train_here,
    weights_of,
)
from support.programs import finish
from tunesmith.core.errors import ConfigError
from tunesmith.core.files import verify_folder
from tunesmith.datasets.example import Split
from tunesmith.datasets.reading import read_split
from tunesmith.profiles.profile import Budgets, Checkpoints, Method, Recipe, Validation
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.launch import launch
from tunesmith.programs.protocol import Metrics, Result, ResultStatus
from tunesmith.programs.result_check import check_train_result
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import BaseModelRef, DatasetRef, TrainSpec
from tunesmith.training.trainers.registry import find_trainer

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is missing: pip install 'tunesmith[trl]'"),
    pytest.mark.xdist_group("trainer-trl"),
]
METHODS = (Method.SFT, Method.DPO, Method.ORPO)


def pairs(num: int) -> list[Row]:
    return [
        {
            "prompt": f"say {number}" + "!" * (number % 7),
            "chosen": "yes " * (1 + number % 3),
            "rejected": f"no {number}",
        }
        for number in range(num)
    ]


def exactly(folder: Path, num_train: int) -> DatasetRef:
    """Pairs of which that many are trained on; which ones is decided by their hash."""
    for num in range(num_train, 2 * num_train):
        made = a_dataset(folder / f"{num}", pairs(num), heldout_share=0.1, validation_share=0.1)
        if made.num_train == num_train:
            return made
    raise AssertionError("no such number")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("trl") / "base"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return exactly(tmp_path_factory.mktemp("trl-data"), 32)


def a_spec(base: BaseModelRef, dataset: DatasetRef, method: Method = Method.SFT, **changes: Any) -> TrainSpec:
    """Several forward passes per step, so that accumulation is at work."""
    recipe = {"method": method, "max_steps": 6, "epochs": 10, "micro_batch_tokens": 400, "batch_tokens": 1000}
    recipe |= changes.pop("recipe", {})
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    fields: dict[str, Any] = {"validation": Validation(every_steps=6, max_cases=3)}
    fields |= {"trainer": "trl", "method": method, "recipe": a_recipe(**recipe)} | changes
    return a_train_spec(base, dataset, **fields)


def train_by_trl(spec: TrainSpec, folder: Path) -> Result:
    from tunesmith.training.trainers.trl.train import train

    return train(a_program(spec, folder))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in METHODS),
        (Method.SFT, {"dora": True, "rslora": True}),
        (Method.SFT, {"train_embeddings": True}),
        (Method.DPO, {"train_embeddings": True}),
    ],
)
def test_trl_losses_and_gradients_equal_natives_on_the_same_examples(
    base: BaseModelRef, dataset: DatasetRef, tmp_path: Path, method: Method, changes: dict[str, Any]
) -> None:
    # each step is all 32 examples in one forward pass; dropout draws in another order, so it is off
    recipe = {"max_steps": 2, "batch_tokens": 100_000, "micro_batch_tokens": 100_000, "lora_dropout": 0.0, "epochs": 2}
    ours, theirs = tmp_path / "native", tmp_path / "trl"
    native = train_here(a_spec(base, dataset, method, recipe=recipe | changes, trainer="native"), ours)
    result = train_by_trl(a_spec(base, dataset, method, recipe=recipe | changes), theirs)
    assert losses_of(theirs) == pytest.approx(losses_of(ours), abs=1e-4)  # of the second, so the update is the same too
    assert losses_of(theirs)[2] < losses_of(theirs)[1]
    norms = [{event.step: event.values["grad_norm"] for event in metrics_of(folder)} for folder in (ours, theirs)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert result.num_trained_tokens == native.num_trained_tokens


def metrics_of(folder: Path) -> list[Metrics]:
    return [event for event in events_of(folder) if isinstance(event, Metrics)]


@pytest.mark.parametrize("method", METHODS)
def test_trl_resume_equals_never_stopping_for_every_method(
    base: BaseModelRef, dataset: DatasetRef, tmp_path: Path, method: Method
) -> None:
    spec = a_spec(base, dataset, method, recipe={"train_embeddings": method is not Method.SFT})
    train_by_trl(spec, tmp_path / "whole")
    assert_resumes(spec, tmp_path)
    assert pickles_below(tmp_path) == []
    assert not list(tmp_path.glob("*/.trl"))


def test_trl_dpo_from_an_adapter_resumes_with_the_reference_it_began_with(
    base: BaseModelRef, dataset: DatasetRef, tmp_path: Path
) -> None:
    first = train_by_trl(a_spec(base, dataset, Method.SFT), tmp_path / "first")
    spec = a_spec(base, dataset, Method.DPO, start=adapter_ref(tmp_path / "first", first))
    train_by_trl(spec, tmp_path / "whole")
    assert losses_of(tmp_path / "whole")[1] == pytest.approx(math.log(2), abs=1e-2)  # policy and reference are one
    assert_resumes(spec, tmp_path)


def assert_resumes(spec: TrainSpec, root: Path) -> None:
    source = resume_from(root / "whole", 3)
    train_by_trl(spec.model_copy(update={"resume": source, "attempt": an_attempt()}), root / "again")
    whole, again = losses_of(root / "whole"), losses_of(root / "again")
    assert list(again) == [4, 5, 6]
    assert again.items() <= whole.items()  # to the bit
    assert weights_of(root / "again") == weights_of(root / "whole")


def pickles_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}]


def test_trl_nan_in_the_base_is_seen_raw_and_names_the_examples(tmp_path: Path) -> None:
    """In the embedding of one character, so that only the one example with it is broken: a look ahead may miss it."""
    folder = a_micro_base(tmp_path / "base", tied=False)
    break_embedding_of(folder, "~")
    made = a_dataset(tmp_path / "data", [*pairs(200), {"prompt": "~", "chosen": "yes", "rejected": "no"}])
    guilty = [example.id for example in read_split(Path(made.path), Split.TRAIN) if example.prompt[0]["content"] == "~"]
    assert len(guilty) == 1
    for seed in range(20):
        recipe = {"seed": seed, "max_steps": None, "epochs": 1}
        spec = a_spec(a_base_ref(folder), made, recipe=recipe, validation=Validation(every_steps=1000, max_cases=1))
        with pytest.raises(ProgramFailure) as caught:
            train_by_trl(spec, tmp_path / f"out-{seed}")
        assert caught.value.error_class is ErrorClass.NONFINITE
        if "the bare base's loss" not in caught.value.message:  # the look ahead happened to see that example
            break
    told = metrics_of(tmp_path / f"out-{seed}")
    assert [math.isnan(event.values["loss"]) for event in told] == [False] * (len(told) - 1) + [True]
    found = re.search(r"the loss is nan at step (\d+); examples: ([0-9a-f, ]+);", caught.value.message)
    assert found is not None
    assert int(found[1]) == told[-1].step
    assert guilty[0] in found[2].split(", ")
    assert len(found[2].split(", ")) == 8  # those of its forward pass


def break_embedding_of(base: Path, character: str) -> None:
    from tunesmith.models.loading import load_tokenizer  # isort: skip - it sets how torch's threads wait
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    (token,) = load_tokenizer(base)(character, add_special_tokens=False).input_ids
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, base / "model.safetensors", {"format": "pt"})


def test_trl_divergence_is_seen_and_keeps_the_last_good_checkpoint(
    base: BaseModelRef, dataset: DatasetRef, tmp_path: Path
) -> None:
    recipe = {"lr": 1.0, "max_grad_norm": 1e6, "max_steps": 50, "warmup": 0.95, "lora_dropout": 0.0}
    spec = a_spec(base, dataset, recipe=recipe, checkpoints=Checkpoints(every_steps=1))
    overflows = spec.run.recipe.model_copy(update={"lora_alpha": 1e17})  # more than a profile may say
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"recipe": overflows})})
    with pytest.raises(ProgramFailure, match=r"(the loss|the gradient norm) is (nan|inf) at step 2; examples: "):
        train_by_trl(spec, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-1"]
    verify_folder(tmp_path / "out" / "checkpoints" / "step-1")


def test_trl_long_examples_are_dropped_and_counted_never_cut(base: BaseModelRef, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 60}]}
    rows = [
        *small_rows(40),
        *({"messages": [{**long["messages"][0], "content": f"q{n}"}, long["messages"][1]]} for n in range(9)),
    ]
    made = a_dataset(tmp_path / "data", rows, heldout_share=0.1, validation_share=0.1)
    spec = a_spec(base, made, recipe={"max_length": 100, "max_steps": 2})
    result = train_by_trl(spec, tmp_path / "out")
    too_long = [
        example for example in read_split(Path(made.path), Split.TRAIN) if len(example.messages[-1]["content"]) > 100
    ]
    assert 0 < len(too_long) == result.num_dropped_examples
    assert any("dropped whole" in getattr(event, "message", "") for event in events_of(tmp_path / "out"))


@pytest.mark.parametrize("method", METHODS)
def test_trl_is_given_exactly_the_tokens_of_the_chat_template(
    base: BaseModelRef, dataset: DatasetRef, method: Method
) -> None:
    from tunesmith.models.chat import ChatFormat
    from tunesmith.models.loading import load_tokenizer
    from tunesmith.training.trainers.native.items import item_of
    from tunesmith.training.trainers.trl.rows import collator_of

    chat = ChatFormat(load_tokenizer(Path(base.path)))
    run = a_spec(base, dataset, method).run
    examples = read_split(Path(dataset.path), Split.TRAIN)
    batch = collator_of(method, [item_of(run, chat, example) for example in examples], chat.pad_id)(
        range(len(examples))
    )
    better = [chat.tokenize(example.id, example.messages) for example in examples]
    worse = [chat.tokenize(example.id, (*example.prompt, *(example.rejected or ()))) for example in examples]
    match method:
        case Method.SFT:
            found = _rows(batch["input_ids"], batch["attention_mask"], batch["labels"] != -100)
            expected = better
        case Method.DPO:
            found = _rows(batch["input_ids"], batch["attention_mask"], batch["completion_mask"] == 1)
            expected = [*better, *worse]
        case _:
            found = []
            for name in ("chosen", "rejected"):
                labels = batch[f"{name}_labels"] != -100
                found += _rows(batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"], labels)
            expected = [*better, *worse]
    assert found == [(row.ids, row.loss_mask) for row in expected]


def _rows(ids: Any, mask: Any, trained: Any) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Without padding, which must be on the right and never trained."""
    rows = []
    for row_ids, row_mask, row_trained in zip(ids.tolist(), mask.tolist(), trained.tolist(), strict=True):
        num = sum(row_mask)
        assert row_mask == [1] * num + [0] * (len(row_mask) - num)
        assert not any(row_trained[num:])
        rows.append((tuple(row_ids[:num]), tuple(row_trained[:num])))
    return rows


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": Method.KTO}, "recipe.method: trainer trl cannot do kto"),
        (
            {"method": Method.ORPO, "recipe": {"orpo_nll": "answer"}},
            "recipe.orpo_nll: TRL learns the whole conversation",
        ),
        ({"trainer_options": {"packing": True}}, "trainer.options: trainer trl takes none, found packing"),
    ],
)
def test_trl_what_it_cannot_honour_is_refused_by_name(
    base: BaseModelRef, dataset: DatasetRef, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        train_by_trl(a_spec(base, dataset, **changes), tmp_path / "out")


def test_trl_token_budget_ends_it_with_the_best_so_far(base: BaseModelRef, dataset: DatasetRef, tmp_path: Path) -> None:
    train_by_trl(a_spec(base, dataset), tmp_path / "whole")
    tokens = {event.step: int(event.values["tokens"]) for event in metrics_of(tmp_path / "whole")}
    result = train_by_trl(a_spec(base, dataset, budgets=Budgets(tokens=tokens[3])), tmp_path / "out")
    assert (result.status, result.num_steps, result.detail["budget"]) == (ResultStatus.SUCCEEDED, 3, "tokens")
    with pytest.raises(ProgramFailure, match="one step needs"):
        train_by_trl(a_spec(base, dataset, budgets=Budgets(tokens=tokens[1] - 1)), tmp_path / "none")


def test_trl_not_installed_is_one_line_that_says_what_to_install(
    base: BaseModelRef, dataset: DatasetRef, tmp_path: Path
) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "trl.py").write_text("raise ModuleNotFoundError('No module named trl', name='trl')\n")
    spec = a_spec(base, dataset)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "absent")}
    code = finish(launch(find_trainer("trl").argv, spec, tmp_path / "out", env=env))
    judgement = check_train_result(spec, tmp_path / "out", code)
    assert judgement.error_class is ErrorClass.CONFIG
    assert judgement.error is not None
    assert judgement.error.endswith("install it: pip install 'tunesmith[trl]'")


def lengths_of(num: int) -> Sequence[int]:
    return [10 + number * 7 % 30 for number in range(num)]


def test_plan_after_running_out_of_memory_has_the_same_steps_in_smaller_micro_batches() -> None:
    from tunesmith.training.trainers.trl.plan import Plan

    recipe = Recipe(epochs=2.5, batch_tokens=400, micro_batch_tokens=330, seed=7)
    plan, smaller = Plan(lengths_of(50), 40, recipe), Plan(lengths_of(50), 40, recipe, divisor=4)
    assert (plan.micro_batches.size, smaller.micro_batches.size) == (8, 2)  # eight of forty tokens stay within 330
    assert plan.micro_batches.per_step == smaller.micro_batches.per_step == 16
    assert [plan.step(step) for step in range(plan.num_steps)] == [smaller.step(step) for step in range(plan.num_steps)]
    seen = [index for step in range(plan.num_steps) for index in plan.step(step)]
    assert sorted(seen)[:100] != seen[:100]
    assert all(seen.count(index) in (2, 3) for index in range(50))
    assert list(plan.from_step(3)) == seen[3 * 16 :]


def test_plan_of_few_or_long_examples_still_has_whole_steps() -> None:
    from tunesmith.training.trainers.trl.plan import Plan

    one = Plan([5000], 5000, Recipe(epochs=3, batch_tokens=16, micro_batch_tokens=16))
    assert (one.micro_batches.size, one.micro_batches.num, one.num_steps, one.step(2)) == (1, 1, 3, [0])
    three = Plan([10, 20, 30], 30, Recipe(epochs=1, batch_tokens=8192))
    assert (three.micro_batches.per_step, three.num_steps) == (2, 2)
    assert {index for step in range(2) for index in three.step(step)} == {0, 1, 2}
