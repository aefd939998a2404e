"""The native trainer and the held-out evaluator on CUDA: same task, same numbers as on a CPU within bf16 noise."""

from __future__ import annotations

import math
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
    pair_rows,
    resume_from,
    small_rows,
    train_here,
)
from tunesmith.profiles.profile import Checkpoints, Method
from tunesmith.programs.protocol import ResultStatus

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunesmith[train]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:cuDNN Attention"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run `make gpu` on a GPU machine"),
]
BF16_TOLERANCE = 0.02  # relative, between two trainings on one GPU; one step of bf16 is 0.008
FIRST_STEP_TOLERANCE = 0.005  # same weights on both sides: only the arithmetic differs
CURVE_TOLERANCE = 0.1  # 40 steps at a high rate let the difference grow; 0.05 was seen


def test_training_on_cuda_follows_the_cpu_resumes_and_scores_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = a_base_ref(a_micro_base(tmp_path / "base"))
    data = a_dataset(tmp_path / "data", small_rows(120), validation_share=0.2)
    recipe = a_recipe(epochs=100, max_steps=40, lr=2e-2, lora_dropout=0.0, train_embeddings=True)
    spec = a_train_spec(base, data, recipe=recipe, checkpoints=Checkpoints(every_steps=20, keep=10))

    on_gpu = train_here(spec, tmp_path / "gpu")
    assert on_gpu.status is ResultStatus.SUCCEEDED
    assert torch.cuda.max_memory_allocated() > 0, "it trained on the CPU"
    gpu = losses_of(tmp_path / "gpu")
    assert gpu[max(gpu)] < 0.8 * gpu[min(gpu)]

    train_here(spec.model_copy(update={"resume": resume_from(tmp_path / "gpu", 20)}), tmp_path / "resumed")
    resumed = losses_of(tmp_path / "resumed")
    assert all(math.isclose(resumed[step], gpu[step], rel_tol=BF16_TOLERANCE) for step in resumed)

    adapter = adapter_ref(tmp_path / "gpu", on_gpu)
    result, scores = evaluate_here(an_evaluate_spec(tmp_path, base, small_rows(40), adapter), tmp_path / "scored")
    assert result.status is ResultStatus.SUCCEEDED
    candidate, baseline = scores.by_subject["candidate"], scores.by_subject["baseline"]
    mean = [sum(score.values["heldout_loss"] for score in side) / len(side) for side in (candidate, baseline)]
    assert mean[0] < mean[1]

    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(torch.cuda, "is_available", lambda: False)
        train_here(spec, tmp_path / "cpu")
    cpu = losses_of(tmp_path / "cpu")
    assert math.isclose(gpu[1], cpu[1], rel_tol=FIRST_STEP_TOLERANCE)
    worst = max(abs(gpu[step] / cpu[step] - 1.0) for step in cpu)
    assert worst < CURVE_TOLERANCE, f"the curves on GPU and CPU differ by {worst:.3f}"


@pytest.mark.parametrize("method", [Method.SFT, Method.DPO, Method.ORPO, Method.KTO])
def test_method_on_cuda_is_the_same_packed_padded_and_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    base = a_base_ref(a_micro_base(tmp_path / "base"))
    data = a_dataset(tmp_path / "data", pair_rows(80), validation_share=0.2)

    def train(name: str, packing: bool) -> dict[int, float]:
        recipe = a_recipe(method=method, packing=packing, max_steps=4, batch_tokens=600, lora_dropout=0.0)
        train_here(a_train_spec(base, data, method=method, recipe=recipe), tmp_path / name)
        return losses_of(tmp_path / name)

    packed, padded = train("packed", True), train("padded", False)
    assert packed == pytest.approx(padded, rel=BF16_TOLERANCE)
    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(torch.cuda, "is_available", lambda: False)
        cpu = train("cpu", True)
    assert packed[1] == pytest.approx(cpu[1], rel=BF16_TOLERANCE)


def test_two_processes_on_one_gpu_follow_the_losses_of_one(tmp_path: Path) -> None:
    base = a_base_ref(a_micro_base(tmp_path / "base"))
    data = a_dataset(tmp_path / "data", pair_rows(80), validation_share=0.2)
    recipe = a_recipe(max_steps=4, batch_tokens=600, micro_batch_tokens=150, lora_dropout=0.0)
    for num in (1, 2):
        train_here(a_train_spec(base, data, num_processes=num, recipe=recipe), tmp_path / str(num))
    assert losses_of(tmp_path / "2") == pytest.approx(losses_of(tmp_path / "1"), rel=BF16_TOLERANCE)
