"""The fast path on CUDA: the slow path's losses for fifty steps, a CPU's score on a task, resume after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.native import (
    a_base_ref,
    a_dataset,
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
    train_here,
)
from tunesmith.demo import dates
from tunesmith.profiles.profile import Checkpoints, Method, Recipe
from tunesmith.programs.protocol import CONTROL, SPEC, Log, ResultStatus

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunesmith[train]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run `make gpu` on a GPU machine"),
]
SAME_SCORE = 0.2
"""Between two scores of 100 cases near 0.8: the cases alone give their difference a standard deviation of 0.057, and
two trainings in different precision add their own."""
SAME_CURVE = 0.03
"""Between two trainings on CUDA, of the first loss: bf16 has 8 bits, and fifty steps let the difference grow."""


def logs_of(folder: Path) -> str:
    return "\n".join(event.message for event in events_of(folder) if isinstance(event, Log))


def a_fast_recipe(**changes: object) -> Recipe:
    fields = {"lr": 2e-3, "epochs": 100, "batch_tokens": 2048, "micro_batch_tokens": 1024, "train_embeddings": False}
    return a_recipe(**(fields | changes))


def worst_difference(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) for step in one) / max(abs(one[min(one)]), 1e-6)


@pytest.mark.parametrize("method", [Method.SFT, Method.DPO, Method.ORPO, Method.KTO])
@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_fast_path_follows_the_slow_one_for_fifty_steps(tmp_path: Path, method: Method, checkpointing: str) -> None:
    if checkpointing == "all" and method is not Method.ORPO:
        pytest.skip("layers computed again are tried with one method: they do not know of it")
    base = a_base_ref(quick_base())
    data = a_dataset(tmp_path / "data", pair_rows(300), validation_share=0.1)
    for name, is_fast in (("fast", True), ("slow", False)):
        again = checkpointing if is_fast else "none"
        recipe = a_fast_recipe(method=method, max_steps=50, fast_path=is_fast, activation_checkpointing=again)
        result = train_here(a_train_spec(base, data, method=method, recipe=recipe), tmp_path / name)
        assert result.status is ResultStatus.SUCCEEDED
        assert ("fast path: it agrees" in logs_of(tmp_path / name)) == is_fast
    assert ("small passes are replayed" in logs_of(tmp_path / "fast")) == (checkpointing == "none")
    fast, slow = losses_of(tmp_path / "fast"), losses_of(tmp_path / "slow")
    worst = worst_difference(slow, fast)
    print(f"FIGURE {method.value} {checkpointing}: {slow[1]:.4f} -> {slow[50]:.4f}, apart by {worst:.4f} at most")
    assert slow[50] < 0.9 * slow[1]
    assert worst < SAME_CURVE


def test_a_real_small_model_learns_the_same_task_on_gpu_and_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = a_base_ref(quick_base())
    data = a_dataset(tmp_path / "data", dates.mixed_rows(900, seed=3), validation_share=0.1)
    recipe = a_fast_recipe(lr=1e-2, lora_rank=16, lora_alpha=32.0, max_steps=160, micro_batch_tokens=2048)
    spec = a_train_spec(base, data, recipe=recipe)
    cases = dates.numbers_rows(100, seed=77)
    scores = {}
    for name in ("gpu", "cpu"):
        with monkeypatch.context() as here:
            if name == "cpu":
                here.setattr(torch.cuda, "is_available", lambda: False)
            result = train_here(spec, tmp_path / name)
        asked = an_evaluate_spec(
            tmp_path, base, cases, adapter_ref(tmp_path / name, result), metrics=("exact_match_greedy",)
        )
        _, found = evaluate_here(asked, tmp_path / f"scores-{name}")
        for label in ("candidate", "baseline"):
            values = [score.values["exact_match_greedy"] for score in found.by_subject[label]]
            scores[name, label] = sum(values) / len(values)
    print(f"FIGURE exact match: {scores}")
    assert "fast path: it agrees" in logs_of(tmp_path / "gpu")
    assert scores["gpu", "candidate"] > scores["gpu", "baseline"] + 0.5
    assert abs(scores["gpu", "candidate"] - scores["cpu", "candidate"]) <= SAME_SCORE


def test_killed_on_cuda_and_resumed_it_follows_the_uninterrupted_one(tmp_path: Path) -> None:
    base = a_base_ref(quick_base())
    data = a_dataset(tmp_path / "data", dates.mixed_rows(600, seed=3), validation_share=0.1)
    spec = a_train_spec(base, data, recipe=a_fast_recipe(max_steps=60), checkpoints=Checkpoints(every_steps=5, keep=20))
    assert train_here(spec, tmp_path / "whole").status is ResultStatus.SUCCEEDED
    whole = losses_of(tmp_path / "whole")

    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / CONTROL).touch()
    (killed / SPEC).write_text(spec.model_dump_json())
    argv = [
        sys.executable,
        "-m",
        "tunesmith.training.trainers.main",
        "--spec",
        str(killed / SPEC),
        "--output-dir",
        str(killed),
    ]
    program = subprocess.Popen(argv, start_new_session=True)
    deadline = time.monotonic() + 240  # kernels may have to be compiled first
    while not any(step >= 22 for step in losses_of(killed)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    last = max(step for step in range(5, 60, 5) if (killed / "checkpoints").exists() and _has(killed, step))
    assert last < 60, "it was over before it was killed"

    train_here(spec.model_copy(update={"resume": resume_from(killed, last)}), tmp_path / "resumed")
    resumed = losses_of(tmp_path / "resumed")
    assert min(resumed) == last + 1
    worst = worst_difference({step: whole[step] for step in resumed}, resumed)
    print(f"FIGURE killed, resumed from step {last}: apart by {worst:.5f} at most")
    assert worst < SAME_CURVE


def _has(folder: Path, step: int) -> bool:
    try:
        return Path(resume_from(folder, step).path).exists()
    except IndexError:
        return False
