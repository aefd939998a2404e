"""What is refused about `recipe.quantize`, each with what to do; needs no bitsandbytes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from support.config import a_base, a_workspace
from support.native import a_base_ref, a_dataset, a_micro_base, a_recipe, a_train_spec, small_rows, train_here
from tunesmith.core.errors import ConfigError
from tunesmith.datasets.screens.detectors import check_installed
from tunesmith.evaluation.evaluators.registry import find_metric
from tunesmith.models.loading import load_base
from tunesmith.models.quantized import dense_weight, is_quantized
from tunesmith.profiles.checks import check_profile
from tunesmith.profiles.profile import Recipe
from tunesmith.profiles.resolve import resolve
from tunesmith.training.trainers.registry import TRAINERS

CPU = torch.device("cpu")


def check(folder: Path, trainer: str, *overrides: str) -> None:
    workspace = a_workspace(folder, "recipe:\n  max_length: 512\n  quantize: nf4\n")
    a_base(workspace)
    resolved = resolve("dates", workspace=workspace, environ={}, overrides=list(overrides))
    check_profile(
        resolved,
        workspace,
        locked=None,
        trainer=TRAINERS[trainer],
        target_kinds={"directory"},
        check_detector=check_installed,
        check_metric=find_metric,
    )


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_trainer_that_cannot_quantize_is_refused_before_queueing(tmp_path: Path, trainer: str) -> None:
    if trainer in ("native", "dry-run"):
        check(tmp_path, trainer)
        return
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, trainer)
    assert caught.value.message == (
        f"profile dates: recipe.quantize: trainer {trainer} cannot train on a base in nf4; use native, or set "
        "recipe.quantize: none"
    )


def test_full_tuning_of_a_quantized_base_is_refused_at_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, "native", "recipe.tuning=full")
    assert "recipe.quantize" in caught.value.message
    assert "set recipe.quantize: none, or recipe.tuning: lora" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("wrong", [{"quantize": "int8"}, {"quantize": "nf4", "tuning": "full"}])
def test_recipe_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="quantize"):
        Recipe(**wrong)


def take_away_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.nn", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)


def test_missing_library_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away_bitsandbytes(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'tunesmith\[qlora\]', or set recipe.quantize: none"):
        load_base(tmp_path / "never-read", CPU, quantize="nf4")


def test_library_that_fails_on_the_device_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no native\n library for this machine")

    nn = ModuleType("bitsandbytes.nn")
    nn.__dict__.update(Linear4bit=broken, Params4bit=broken)
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", nn)
    with pytest.raises(ConfigError) as caught:
        load_base(tmp_path / "never-read", CPU, quantize="nf4")
    assert caught.value.message == (
        "recipe.quantize: bitsandbytes does not work on cpu here (no native library for this machine); install a build "
        "for this machine (pip install --upgrade 'tunesmith[qlora]'), or set recipe.quantize: none"
    )


def test_training_without_the_library_ends_before_the_base_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, data = a_base_ref(a_micro_base(tmp_path / "base")), a_dataset(tmp_path / "data", small_rows(30))
    take_away_bitsandbytes(monkeypatch)
    with pytest.raises(ConfigError, match="needs bitsandbytes"):
        train_here(a_train_spec(base, data, recipe=a_recipe(quantize="nf4")), tmp_path / "out")


def test_dense_layer_gives_its_own_weight() -> None:
    linear = torch.nn.Linear(4, 3)
    assert not is_quantized(linear)
    assert not is_quantized(SimpleNamespace())
    assert dense_weight(linear).data_ptr() == linear.weight.data_ptr()
    assert not dense_weight(linear).requires_grad
