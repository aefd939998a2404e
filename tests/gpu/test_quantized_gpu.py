"""A base in 4 bits on CUDA: near the dense one, smaller, as on a CPU, and an adapter learns on it and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.native import (
    a_dataset,
    a_recipe,
    a_train_spec,
    adapter_ref,
    an_evaluate_spec,
    evaluate_here,
    losses_of,
    pair_rows,
    resume_from,
    small_rows,
    train_here,
)
from support.quantized import a_base_of_blocks, skip_without_bitsandbytes
from tunesmith.profiles.profile import Checkpoints, Method
from tunesmith.programs.protocol import ResultStatus
from tunesmith.runs.spec import BaseModelRef

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunesmith[train]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:cuDNN Attention"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run `make gpu` on a GPU machine"),
]
NF4_ERROR = 0.11  # of a matrix of normal weights, by norm, bf16 rounding included; 0.092 on a CPU
FORWARD_ERROR = 0.15  # of the logits, by norm; 0.08 on a CPU
BF16_TOLERANCE = 0.02  # relative, between two trainings on one GPU
CURVE_TOLERANCE = 0.1  # between GPU and CPU over 40 steps at a high rate


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    skip_without_bitsandbytes()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_of_blocks(tmp_path_factory.mktemp("quantized") / "base")


def on_cuda(base: BaseModelRef, quantize: Any) -> Any:
    from tunesmith.models.loading import load_base

    return load_base(Path(base.path), torch.device("cuda"), quantize=quantize)


def test_quantized_base_on_cuda_is_near_the_dense_one_and_smaller(base: BaseModelRef) -> None:
    from tunesmith.models.quantized import dense_weight, is_quantized
    from tunesmith.models.scoring import supports_packing

    dense, quantized = on_cuda(base, "none"), on_cuda(base, "nf4")
    names = [name for name, module in quantized.named_modules() if is_quantized(module)]
    assert len(names) == 14  # seven in each of two layers
    for name in names:
        ours, theirs = quantized.get_submodule(name), dense.get_submodule(name)
        assert ours.weight.is_cuda
        assert dense_weight(ours).dtype is torch.bfloat16
        assert ours.weight.numel() * ours.weight.element_size() * 4 == theirs.weight.numel() * 2
        away = (dense_weight(ours).float() - theirs.weight.float()).norm() / theirs.weight.float().norm()
        assert 0.01 < away < NF4_ERROR, name
    ids = torch.arange(60, device="cuda").view(2, 30)
    with torch.no_grad():
        ours, theirs = quantized(ids).logits.float(), dense(ids).logits.float()
    assert (ours - theirs).norm() / theirs.norm() < FORWARD_ERROR
    assert supports_packing(quantized)


def test_product_on_cuda_is_the_unpacked_weights_forwards_and_backwards(base: BaseModelRef) -> None:
    from tunesmith.models.quantized import dense_weight

    layer = on_cuda(base, "nf4").model.layers[1].mlp.down_proj
    weight = dense_weight(layer).float()
    for rows in (1, 5, 300):  # bitsandbytes has kernels of its own for few rows
        inputs = torch.randn(rows, layer.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        made = layer(inputs)
        made.sum().backward()
        expected = inputs.detach().float() @ weight.T
        assert (made.float() - expected).norm() / expected.norm() < 0.01
        assert (inputs.grad.float() - weight.sum(0)).norm() / weight.sum(0).norm() / rows**0.5 < 0.01


def test_training_in_4_bits_on_cuda_learns_resumes_and_follows_the_cpu(
    base: BaseModelRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = a_dataset(tmp_path / "data", small_rows(60), validation_share=0.2)
    recipe = a_recipe(quantize="nf4", epochs=100, max_steps=40, lr=1e-2, lora_dropout=0.0)
    spec = a_train_spec(base, data, recipe=recipe, checkpoints=Checkpoints(every_steps=20, keep=10))
    result = train_here(spec, tmp_path / "gpu")
    assert result.status is ResultStatus.SUCCEEDED
    gpu = losses_of(tmp_path / "gpu")
    assert gpu[40] < 0.9 * gpu[1]

    train_here(spec.model_copy(update={"resume": resume_from(tmp_path / "gpu", 20)}), tmp_path / "resumed")
    resumed = losses_of(tmp_path / "resumed")
    assert resumed == pytest.approx({step: gpu[step] for step in resumed}, rel=BF16_TOLERANCE)

    adapter = adapter_ref(tmp_path / "gpu", result)
    _, scores = evaluate_here(an_evaluate_spec(tmp_path, base, small_rows(40), adapter), tmp_path / "scored")
    candidate, baseline = scores.by_subject["candidate"], scores.by_subject["baseline"]
    mean = [sum(score.values["heldout_loss"] for score in side) / len(side) for side in (candidate, baseline)]
    assert mean[0] < 0.9 * mean[1]

    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(torch.cuda, "is_available", lambda: False)
        train_here(spec, tmp_path / "cpu")
    assert gpu == pytest.approx(losses_of(tmp_path / "cpu"), rel=CURVE_TOLERANCE)


@pytest.mark.parametrize("method", [Method.DPO, Method.ORPO])
def test_preference_method_in_4_bits_on_cuda_is_the_same_packed_and_padded(
    base: BaseModelRef, tmp_path: Path, method: Method
) -> None:
    data = a_dataset(tmp_path / "data", pair_rows(80), validation_share=0.2)

    def train(name: str, packing: bool) -> dict[int, float]:
        recipe = a_recipe(
            method=method, quantize="nf4", packing=packing, max_steps=4, batch_tokens=600, lora_dropout=0.0
        )
        train_here(a_train_spec(base, data, method=method, recipe=recipe), tmp_path / name)
        return losses_of(tmp_path / name)

    assert train("packed", True) == pytest.approx(train("padded", False), rel=BF16_TOLERANCE)
