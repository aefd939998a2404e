"""What a target cannot serve is known before anything is trained: a table, and one line for each violation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunesmith.core.errors import ConfigError
from tunesmith.core.files import publish_folder
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.deployment.targets.directory import DirectoryTarget
from tunesmith.profiles.profile import Recipe, TargetSettings
from tunesmith.profiles.rules.target_limits import (
    LIMITS,
    VLLM_RANKS,
    adapter_violations,
    limit_violations,
    without_embeddings,
)

EVERYTHING: dict[str, Any] = {"lora_rank": 512, "rslora": True, "dora": True, "train_embeddings": True}


def fields(recipe: Recipe, *targets: TargetSettings) -> list[str]:
    return [line.partition(":")[0] for line in limit_violations(recipe, targets)]


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("directory", []),
        ("embedded", []),
        ("command", []),
        ("of-another-package", []),
        ("vllm", ["lora_rank", "dora", "train_embeddings"]),
        ("llamacpp", ["rslora", "dora", "train_embeddings"]),
        ("ollama", ["rslora", "dora", "train_embeddings"]),
    ],
)
def test_recipe_with_everything_is_refused_by_what_each_kind_cannot_do(kind: str, refused: list[str]) -> None:
    served = [TargetSettings(name="live", kind=kind)]
    if kind in LIMITS and kind != "directory":
        served.append(TargetSettings(name="live", kind="directory", options={"for": kind}))
    for target in served:
        assert fields(Recipe(**EVERYTHING), target) == [f"recipe.{name}" for name in refused]


@pytest.mark.parametrize("kind", sorted(LIMITS))
def test_default_recipe_is_served_by_every_kind(kind: str) -> None:
    assert limit_violations(Recipe(), [TargetSettings(kind=kind)]) == []


def test_each_line_names_field_target_limit_and_what_to_set() -> None:
    (line,) = limit_violations(Recipe(lora_rank=20), [TargetSettings(name="live", kind="vllm")])
    assert line == (
        "recipe.lora_rank: 20 is more than target live (vLLM) loads, 16; set recipe.lora_rank: 16, or start the server "
        "with --max-lora-rank 32 and say so: targets.live.options.max_lora_rank: 32"
    )


@pytest.mark.parametrize("rank", VLLM_RANKS)
def test_vllm_started_with_a_higher_rank_takes_it(rank: int) -> None:
    target = TargetSettings(name="live", kind="vllm", options={"max_lora_rank": rank})
    assert fields(Recipe(lora_rank=rank), target) == []
    if rank < 512:
        assert fields(Recipe(lora_rank=rank + 1), target) == ["recipe.lora_rank"]


def test_alpha_that_is_offered_instead_of_rslora_trains_the_same() -> None:
    (line,) = limit_violations(Recipe(rslora=True, lora_rank=64, lora_alpha=32), [TargetSettings(kind="llamacpp")])
    offered = float(line.partition("recipe.lora_alpha: ")[2].partition(",")[0])
    assert offered / 64 == pytest.approx(32 / 64**0.5)


def test_every_target_has_its_own_line() -> None:
    targets = [
        TargetSettings(name="a", kind="vllm"),
        TargetSettings(name="b", kind="llamacpp"),
        TargetSettings(name="c"),
    ]
    lines = limit_violations(Recipe(dora=True), targets)
    assert ["target a" in lines[0], "target b" in lines[1], len(lines)] == [True, True, 2]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("directory", {"for": "vlm"}, "targets.live.options.for: no kind of server 'vlm'; did you mean 'vllm'?"),
        ("directory", {"for": ["vllm"]}, "targets.live.options.for: no kind of server"),
        ("directory", {"for": "vllm", "max_lora_rank": 17}, "max_lora_rank: '17' is not one of 1, 8, 16"),
        ("vllm", {"max_lora_rank": True}, "max_lora_rank: 'True' is not one of 1, 8, 16"),
        ("vllm", {"max_lora_rank": "64"}, "max_lora_rank: '64' is not one of 1, 8, 16"),
        ("directory", {"max_lora_rank": 64}, "max_lora_rank: only a target for vllm has it"),
    ],
)
def test_option_that_says_who_serves_is_checked(kind: str, options: dict[str, Any], words: str) -> None:
    (line,) = limit_violations(Recipe(**EVERYTHING), [TargetSettings(name="live", kind=kind, options=options)])
    assert words in line


def test_embeddings_left_to_auto_are_no_violation_but_known_not_to_be_served() -> None:
    targets = [
        TargetSettings(name="a"),
        TargetSettings(name="b", kind="vllm"),
        TargetSettings(name="c", options={"for": "ollama"}),
    ]
    assert limit_violations(Recipe(train_embeddings="auto"), targets) == []
    assert without_embeddings(targets) == ("b", "c")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"r": 64}, "lora_rank"),
        ({"rank_pattern": {"q_proj": 64}}, "lora_rank"),
        ({"use_dora": True}, "dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "train_embeddings"),
    ],
)
def test_adapter_is_judged_by_its_own_config(change: dict[str, Any], field: str) -> None:
    config = {"r": 8, "lora_alpha": 16, "bias": "none", "use_rslora": True, "modules_to_save": None}
    assert adapter_violations(config, TargetSettings(kind="vllm")) == []
    (line,) = adapter_violations(config | change, TargetSettings(kind="vllm"))
    assert line.startswith(f"{field}: ")
    assert adapter_violations(config | change, TargetSettings(kind="embedded")) == []


def a_published_adapter(folder: Path, **config: Any) -> ServedAdapter:
    staged = folder / "staged"
    staged.mkdir(parents=True)
    (staged / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | config))
    manifest = publish_folder(staged, folder / "adapter")
    return ServedAdapter(f"dates@{folder.name}", folder / "adapter", manifest.digest)


def test_folder_for_vllm_refuses_at_the_trial_load_what_vllm_would(tmp_path: Path) -> None:
    target = DirectoryTarget({"path": "live", "for": "vllm"}, root=tmp_path, profile="dates")
    reason = target.refusal(a_published_adapter(tmp_path / "a", use_dora=True))
    assert reason is not None
    assert "DoRA" in reason
    assert not (tmp_path / "live").exists()
    assert target.refusal(a_published_adapter(tmp_path / "b")) is None
    anyone = DirectoryTarget({"path": "live"}, root=tmp_path, profile="dates")
    assert anyone.refusal(a_published_adapter(tmp_path / "c", use_dora=True)) is None


@pytest.mark.parametrize("options", [{"for": "vlm"}, {"four": "vllm"}, {"max_lora_rank": 64}])
def test_directory_target_refuses_options_it_does_not_know(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DirectoryTarget(options, root=tmp_path, profile="dates")
