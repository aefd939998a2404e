"""Training an adapter on a base in 4 bits: it learns, resumes to the bit, and works on the base as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_recipe,
    a_train_spec,
    adapter_ref,
    an_evaluate_spec,
    evaluate_here,
    events_of,
    losses_of,
    pair_rows,
    quick_base,
    resume_from,
    small_rows,
    train_here,
    weights_of,
)
from support.quantized import a_base_of_blocks, skip_without_bitsandbytes
from tunesmith.core.errors import ConfigError
from tunesmith.demo import dates
from tunesmith.models.adapters import adapter_norms, detach, new_adapter, settings_text, trained_parameters
from tunesmith.models.loading import load_base
from tunesmith.models.quantized import dense_weight, is_quantized
from tunesmith.models.scoring import supports_packing
from tunesmith.profiles.profile import Checkpoints, Method, Validation
from tunesmith.programs.protocol import Log, Result, ResultStatus, Scores
from tunesmith.runs.spec import BaseModelRef, DatasetRef, TrainSpec

pytestmark = pytest.mark.extra
CPU = torch.device("cpu")
NF4_ERROR = 0.1  # of a matrix of normal weights, by norm; 0.092 was seen
FORWARD_ERROR = 0.15  # of the logits, by norm; 0.08 was seen


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    skip_without_bitsandbytes()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_of_blocks(tmp_path_factory.mktemp("quantized") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("quantized") / "data", small_rows(60), validation_share=0.2)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, base: BaseModelRef, data: DatasetRef
) -> tuple[TrainSpec, Path, Result]:
    """On the base in 4 bits, with dropout, and every checkpoint kept."""
    recipe = a_recipe(quantize="nf4", lr=1e-2, epochs=100, max_steps=40, lora_dropout=0.1)
    spec = a_train_spec(base, data, recipe=recipe, checkpoints=Checkpoints(every_steps=1, keep=1000))
    folder = tmp_path_factory.mktemp("quantized") / "out"
    return spec, folder, train_here(spec, folder)


def both(base: BaseModelRef) -> tuple[Any, Any]:
    folder = Path(base.path)
    return load_base(folder, CPU), load_base(folder, CPU, quantize="nf4")


def mean_loss(scores: Scores, label: str) -> float:
    values = [score.values["heldout_loss"] for score in scores.by_subject[label]]
    return sum(values) / len(values)


def test_quantized_base_is_near_the_dense_one_in_every_layer_and_in_its_logits(base: BaseModelRef) -> None:
    dense, quantized = both(base)
    names = {name for name, module in quantized.named_modules() if is_quantized(module)}
    linear = {name for name, module in dense.named_modules() if isinstance(module, torch.nn.Linear)}
    assert names == linear - {"lm_head"}
    for name in names:
        ours, theirs = quantized.get_submodule(name), dense.get_submodule(name)
        assert dense_weight(ours).dtype is torch.float32
        assert ours.weight.element_size() * ours.weight.numel() * 8 == theirs.weight.numel() * 4
        away = (dense_weight(ours) - theirs.weight).norm() / theirs.weight.norm()
        assert 0.01 < away < NF4_ERROR, name
        assert ours.bias is None or torch.equal(ours.bias, theirs.bias)
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        ours, theirs = quantized(ids).logits, dense(ids).logits
    assert (ours - theirs).norm() / theirs.norm() < FORWARD_ERROR


def test_quantized_base_computes_the_same_with_and_without_gradients(base: BaseModelRef) -> None:
    """And both compute with what `dense_weight` gives: no layout of its own for inference."""
    _, quantized = both(base)
    layer = quantized.model.layers[1].mlp.down_proj
    inputs = torch.randn(3, 5, layer.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = layer(inputs)
    inputs.requires_grad_(True)
    after = layer(inputs)
    after.sum().backward()
    weight = dense_weight(layer)
    assert torch.equal(before, after)
    assert torch.allclose(after, inputs @ weight.T, atol=1e-5)
    assert torch.allclose(inputs.grad, weight.sum(0).expand_as(inputs), atol=1e-5)


def test_quantized_base_keeps_packed_examples_apart_and_its_embeddings(base: BaseModelRef) -> None:
    dense, quantized = both(base)
    assert supports_packing(quantized)
    assert torch.equal(quantized.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert quantized.lm_head.weight is quantized.model.embed_tokens.weight
    assert not any(tensor.requires_grad for tensor in quantized.parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_of_a_quantized_base_is_the_plain_ones_twin(base: BaseModelRef, dora: bool) -> None:
    """Same settings, same names, same initial low-rank weights; DoRA measures its sizes on the 4-bit weights."""
    adapters = []
    for model in both(base):
        torch.manual_seed(3)
        adapters.append(new_adapter(model, a_recipe(dora=dora)))
    plain, ours = adapters
    assert settings_text(plain, "base") == settings_text(ours, "base")
    pairs = zip(trained_parameters(plain), trained_parameters(ours), strict=True)
    for (name, theirs), (same, tensor) in pairs:
        assert name == same
        assert torch.allclose(tensor, theirs, rtol=NF4_ERROR) if "magnitude" in name else torch.equal(tensor, theirs)
    loss = ours(torch.arange(30).unsqueeze(0), labels=torch.arange(30).unsqueeze(0)).loss
    loss.backward()
    assert all(tensor.grad is not None for _, tensor in trained_parameters(ours))
    assert all(norm == pytest.approx(0.0, abs=1e-4) for norm in adapter_norms(ours).values())
    assert is_quantized(detach(ours).model.layers[0].self_attn.q_proj)


def test_training_on_a_quantized_base_learns(trained: tuple[TrainSpec, Path, Result]) -> None:
    _, folder, result = trained
    assert result.status is ResultStatus.SUCCEEDED
    losses = losses_of(folder)
    assert losses[40] < 0.9 * losses[1]  # a random base with a fixed head cannot do much better
    said = [event.message for event in events_of(folder) if isinstance(event, Log)]
    assert not any("cannot keep packed examples apart" in message for message in said)


@pytest.mark.parametrize("killed_at", [1, 17, 39])
def test_resumed_training_equals_one_never_stopped(
    trained: tuple[TrainSpec, Path, Result], tmp_path: Path, killed_at: int
) -> None:
    spec, folder, _ = trained
    source = resume_from(folder, killed_at)
    shutil.copytree(source.path, tmp_path / "checkpoint")
    moved = source.model_copy(update={"path": str(tmp_path / "checkpoint")})
    train_here(spec.model_copy(update={"resume": moved}), tmp_path / "out")
    assert losses_of(tmp_path / "out") == {step: loss for step, loss in losses_of(folder).items() if step > killed_at}
    assert weights_of(tmp_path / "out") == weights_of(folder)


def test_checkpoint_is_not_continued_on_the_unquantized_base(
    trained: tuple[TrainSpec, Path, Result], tmp_path: Path
) -> None:
    spec, folder, _ = trained
    recipe = spec.run.recipe.model_copy(update={"quantize": "none"})
    run = spec.run.model_copy(update={"recipe": recipe})
    with pytest.raises(Exception, match=r"recipe\.quantize is none now and was nf4"):
        train_here(spec.model_copy(update={"run": run, "resume": resume_from(folder, 5)}), tmp_path / "out")


def test_adapter_helps_the_base_as_it_was(
    trained: tuple[TrainSpec, Path, Result], base: BaseModelRef, tmp_path: Path
) -> None:
    """Evaluation loads the unquantised base, as serving does."""
    _, folder, result = trained
    spec = an_evaluate_spec(tmp_path, base, small_rows(40), adapter_ref(folder, result))
    _, scores = evaluate_here(spec, tmp_path / "scored")
    assert mean_loss(scores, "candidate") < 0.9 * mean_loss(scores, "baseline")


def test_trained_base_learns_a_task_in_4_bits_and_does_it_on_the_full_base(tmp_path: Path) -> None:
    """On cases that neither saw; of this base, only the layers with rows of whole blocks are in 4 bits."""
    folder = quick_base()
    layer = load_base(folder, CPU, quantize="nf4").model.layers[0]
    assert is_quantized(layer.mlp.down_proj)
    assert not is_quantized(layer.mlp.up_proj)
    base = a_base_ref(folder)
    recipe = a_recipe(
        quantize="nf4",
        lr=5e-3,
        epochs=100,
        max_steps=40,
        batch_tokens=1536,
        micro_batch_tokens=4096,
        lora_rank=16,
        train_embeddings=True,
    )
    rows = dates.mixed_rows(500, seed=7)
    known = {row["messages"][0]["content"] for row in rows}
    unseen = [row for row in dates.mixed_rows(100, seed=99) if row["messages"][0]["content"] not in known]
    rare = {"validation": Validation(every_steps=40, max_cases=10), "checkpoints": Checkpoints(every_steps=100)}
    result = train_here(a_train_spec(base, a_dataset(tmp_path / "data", rows), recipe=recipe, **rare), tmp_path / "out")
    spec = an_evaluate_spec(tmp_path, base, unseen, adapter_ref(tmp_path / "out", result))
    _, scores = evaluate_here(spec, tmp_path / "scored")
    assert mean_loss(scores, "candidate") < 0.3 * mean_loss(scores, "baseline")


def test_preference_method_measures_from_the_quantized_base(base: BaseModelRef, tmp_path: Path) -> None:
    """The reference of DPO is the base that is trained on: its first loss is log 2 only then."""
    pairs = a_dataset(tmp_path / "pairs", pair_rows(60), validation_share=0.2)
    recipe = a_recipe(method=Method.DPO, quantize="nf4", max_steps=2, lora_dropout=0.0)
    train_here(a_train_spec(base, pairs, method=Method.DPO, recipe=recipe), tmp_path / "out")
    assert losses_of(tmp_path / "out")[1] == pytest.approx(0.6931, abs=1e-3)


def test_base_without_whole_blocks_is_refused(tmp_path: Path) -> None:
    folder = a_micro_base(tmp_path / "micro")
    with pytest.raises(ConfigError, match=r"multiple of 64 weights, which nf4 needs; set recipe\.quantize: none"):
        load_base(folder, CPU, quantize="nf4")


def test_library_that_computes_wrong_numbers_is_refused(base: BaseModelRef, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional

    usual = functional.dequantize_4bit
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *args: -usual(*args))
    with pytest.raises(ConfigError, match=r"computes wrong numbers on cpu here .*; pip install --upgrade"):
        load_base(Path(base.path), CPU, quantize="nf4")
