"""Everything that is wrong with a profile and its base is found before anything is queued, all at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.config import HEAD, a_base, a_workspace, write_profile
from tunesmith.core.errors import ConfigError, LockedError
from tunesmith.datasets.screens.detectors import check_installed
from tunesmith.evaluation.evaluators.registry import find_metric
from tunesmith.profiles.checks import CheckedProfile, check_profile
from tunesmith.profiles.profile import HardwareTier, Method
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.profiles.workspace import Workspace
from tunesmith.training.trainers.registry import TRAINERS

FITS = "recipe:\n  max_length: 512\n"


@dataclass(frozen=True)
class ATrainer:
    name: str = "native"
    tiers: frozenset[HardwareTier] = frozenset({HardwareTier.CPU, HardwareTier.SMALL_GPU})
    default_tier: HardwareTier = HardwareTier.CPU
    methods: frozenset[Method] = field(default=frozenset({Method.SFT}))
    tunings: frozenset[str] = frozenset({"lora"})
    quantizations: frozenset[str] = frozenset({"none"})
    measures: frozenset[str] = frozenset({"validation_loss", "validation_reward_accuracy"})
    max_processes: int = 2


def check(workspace: Workspace, *overrides: str, locked: ProfileLock | None = None) -> CheckedProfile:
    resolved = resolve("dates", workspace=workspace, environ={}, overrides=list(overrides))
    return check_profile(
        resolved,
        workspace,
        locked=locked,
        trainer=ATrainer(),
        target_kinds={"directory"},
        check_detector=check_installed,
        check_metric=find_metric,
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = a_workspace(tmp_path, FITS)
    a_base(workspace)
    return workspace


def test_profile_that_fits_is_checked_with_what_was_read(workspace: Workspace) -> None:
    checked = check(workspace)
    assert checked.base_folder == workspace.root / "models" / "tiny"
    assert checked.architecture.family == "llama"
    assert checked.context == 512
    assert checked.tier is HardwareTier.CPU
    assert checked.lock.heldout_share == 0.1
    assert check(workspace, locked=checked.lock).lock == checked.lock


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_profile_is_checked_against_every_registered_trainer(workspace: Workspace, name: str) -> None:
    resolved = resolve("dates", workspace=workspace, environ={})
    trainer = TRAINERS[name]
    checked = check_profile(
        resolved,
        workspace,
        locked=None,
        trainer=trainer,
        target_kinds={"directory"},
        check_detector=check_installed,
        check_metric=find_metric,
    )
    assert checked.tier is trainer.default_tier


def test_context_of_the_profile_may_be_smaller_than_the_models(workspace: Workspace) -> None:
    assert check(workspace, "base.context=256", "recipe.max_length=256").context == 256


def test_tier_said_wins_over_the_trainers_default(workspace: Workspace) -> None:
    assert check(workspace, "hardware.tier=small-gpu").tier is HardwareTier.SMALL_GPU


@pytest.mark.parametrize("modules", ["[q_proj]", "[self_attn.v_proj, gate_proj]", "[model.embed_tokens]", "all-linear"])
def test_target_modules_that_exist_pass(workspace: Workspace, modules: str) -> None:
    check(workspace, f"recipe.target_modules={modules}")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "hardware.tier=datacenter-gpu",
            "hardware.tier: trainer native does not accept datacenter-gpu; it accepts: cpu, small-gpu",
        ),
        ("validation.best_metric=nope", "validation.best_metric: trainer native does not measure 'nope'"),
        ("validation.best_metric=validation_los", "did you mean 'validation_loss'?"),
        ("validation.best_direction=higher", "validation.best_direction: higher would keep the worst checkpoint"),
        ("hardware.processes=3", "hardware.processes: trainer native trains with at most 2, not 3"),
        ("recipe.quantize=nf4", "recipe.quantize: trainer native cannot train on a base in nf4; use native, or set"),
        ("recipe.method=kto", "recipe.method: trainer native cannot do kto; it can do: sft"),
        ("recipe.max_length=513", "recipe.max_length: 513 is more than the context of 512; lower it"),
        ("base.context=256", "recipe.max_length: 512 is more than the context of 256; lower it"),
        ("base.context=1024", "base.context: 1024 is more than the model's own 512; lower it"),
        ("recipe.target_modules=[q_prj]", "'q_prj' matches no module of the base; did you mean 'q_proj'?"),
        ("recipe.target_modules=[proj]", "'proj' matches no module of the base"),
        ("recipe.target_modules=[input_layernorm]", "'input_layernorm' matches no module"),
        ("targets=[{kind: directry}]", "targets: no kind of target 'directry'; did you mean 'directory'?"),
        ("targets=[{options: {for: vlm}}]", "targets.directory.options.for: no kind of server 'vlm'; did you mean"),
    ],
)
def test_profile_that_cannot_work_is_refused(workspace: Workspace, override: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(workspace, override)
    assert reason in caught.value.message
    assert caught.value.message.startswith("profile dates: ")
    assert "\n" not in caught.value.message
    assert not isinstance(caught.value, LockedError)


@pytest.mark.parametrize(
    ("said", "instead", "reason"),
    [
        ("family: llama", "family: qwen3", "base.family: the profile says qwen3, the model's config.json says llama"),
        ("models/tiny", "models/nowhere", "no such folder; put the model there or mend base.path"),
        ("models/tiny", "''", "cannot be a path"),
    ],
)
def test_profile_whose_base_is_not_there_or_another_is_refused(
    workspace: Workspace, said: str, instead: str, reason: str
) -> None:
    write_profile(workspace, FITS, head=HEAD.replace(said, instead))
    with pytest.raises(ConfigError) as caught:
        check(workspace)
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_recipe_that_a_target_cannot_serve_is_refused_one_line_each(workspace: Workspace) -> None:
    recipe = ("recipe.lora_rank=64", "recipe.dora=true", "recipe.train_embeddings=true")
    check(workspace, *recipe)
    served = "targets=[{name: live, options: {for: vllm}}]"
    with pytest.raises(ConfigError) as caught:
        check(workspace, *recipe, served)
    lines = caught.value.message.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["recipe.lora_rank", "recipe.dora", "recipe.train_embeddings"]
    assert all(line.startswith("profile dates: ") and "target live (vLLM)" in line for line in lines)
    check(workspace, "recipe.lora_rank=64", "targets=[{options: {for: vllm, max_lora_rank: 64}}]")


def test_default_length_beyond_a_small_model_is_refused(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    a_base(workspace)
    with pytest.raises(ConfigError, match=r"recipe\.max_length: 2048 is more than the context of 512"):
        check(workspace)


def test_full_tuning_is_refused_where_trainer_or_target_has_only_adapters(workspace: Workspace) -> None:
    with pytest.raises(ConfigError) as caught:
        check(workspace, "recipe.tuning=full", "targets=[{name: live, options: {for: vllm}}]")
    first, second = caught.value.message.splitlines()
    assert "recipe.tuning: trainer native cannot do full" in first
    assert "target live serves adapters" in second


def test_disabled_profile_is_refused_with_its_reason(workspace: Workspace) -> None:
    path = workspace.profiles_dir / "dates.yaml"
    path.write_text(f"{path.read_text()}\nenabled: false\ndisabled_reason: waits for the new base\n")
    with pytest.raises(ConfigError, match="is disabled: waits for the new base; set `enabled: true`"):
        check(workspace)


@pytest.mark.parametrize("said", ["enabled=true", "enabled=false", "disabled_reason=mine"])
def test_only_the_file_of_a_profile_says_whether_it_is_enabled(workspace: Workspace, said: str) -> None:
    key, _, value = said.partition("=")
    with pytest.raises(ConfigError, match=f"{key}: belongs in the profile's own file"):
        check(workspace, said)
    with pytest.raises(ConfigError, match=f"{key}: belongs in the profile's own file"):
        resolve("dates", workspace=workspace, environ={f"TUNESMITH__{key.upper()}": value})
    with pytest.raises(ConfigError, match=f"{key}: belongs in the profile's own file"):
        resolve("dates", workspace=workspace, environ={}, campaign_overrides={key: value})


@pytest.mark.parametrize(("methods", "passes"), [({Method.ORPO}, True), ({Method.SFT}, True), ({Method.DPO}, False)])
def test_method_auto_needs_a_trainer_for_one_of_its_outcomes(
    workspace: Workspace, methods: set[Method], passes: bool
) -> None:
    resolved = resolve("dates", workspace=workspace, environ={})
    trainer = ATrainer(methods=frozenset(methods))
    if passes:
        check_profile(
            resolved,
            workspace,
            locked=None,
            trainer=trainer,
            target_kinds={"directory"},
            check_detector=check_installed,
            check_metric=find_metric,
        )
    else:
        with pytest.raises(ConfigError, match="cannot do auto; it can do: dpo"):
            check_profile(
                resolved,
                workspace,
                locked=None,
                trainer=trainer,
                target_kinds={"directory"},
                check_detector=check_installed,
                check_metric=find_metric,
            )


def test_role_refuses_a_family_that_is_not_on_its_list(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    write_profile(workspace, FITS, head=HEAD.replace("extractor", "coder").replace("llama", "gemma"))
    with pytest.raises(ConfigError, match=r"base\.family: 'gemma' is not allowed for role coder; allowed: llama"):
        resolve("dates", workspace=workspace, environ={})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"vocab_size": 321}, "vocab_size: locked 320, now 321"),
        ({"num_hidden_layers": 3}, "num_layers: locked 2, now 3"),
        ({"max_position_embeddings": 1024}, "context: locked 512, now 1024"),
    ],
)
def test_base_swapped_after_the_lock_is_refused_by_field(
    workspace: Workspace, changes: dict[str, Any], line: str
) -> None:
    locked = check(workspace).lock
    a_base(workspace, **changes)
    with pytest.raises(LockedError) as caught:
        check(workspace, locked=locked)
    assert caught.value.message == f"profile dates: {line}"


def test_base_whose_config_changed_at_all_after_the_lock_is_refused(workspace: Workspace) -> None:
    locked = check(workspace).lock
    a_base(workspace, max_position_embeddings=256)
    with pytest.raises(LockedError, match=r"base: locked .* settings changed; put it back"):
        check(workspace, "recipe.max_length=256", locked=locked)
    before = locked.model_copy(update={"base_digest": None})  # locked before the digest was kept
    assert check(workspace, "recipe.max_length=256", locked=before).context == 256


def test_split_changed_after_the_lock_is_refused(workspace: Workspace) -> None:
    locked = check(workspace).lock.model_copy(update={"is_split_decided": True})  # a run has trained
    with pytest.raises(LockedError, match=r"data\.heldout_share: locked 0\.1, now 0\.2"):
        check(workspace, "data.heldout_share=0.2", locked=locked)


def test_all_problems_are_reported_together_lock_included(workspace: Workspace) -> None:
    locked = check(workspace).lock.model_copy(update={"is_split_decided": True})  # a run has trained
    with pytest.raises(ConfigError) as caught:
        check(
            workspace,
            "data.heldout_share=0.2",
            "recipe.method=dpo",
            "recipe.max_length=4096",
            "recipe.target_modules=[nothing]",
            locked=locked,
        )
    keys = [line.split(": ")[1] for line in caught.value.message.splitlines()]
    assert keys == ["recipe.method", "recipe.max_length", "recipe.target_modules", "data.heldout_share"]
    assert not isinstance(caught.value, LockedError)
