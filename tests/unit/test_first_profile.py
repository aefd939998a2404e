"""The first profile: shares with which a first round can be judged, readable YAML, and bases that could not be used."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from support.workspaces import BASE_CONFIG, a_base
from tunesmith.core.errors import ConfigError, UsageError
from tunesmith.orchestration.start import StartWish, check_task, first_profile, local_zone, named
from tunesmith.profiles.first_profile import FirstProfile
from tunesmith.profiles.profile import FAMILIES, HardwareTier, Profile, Role
from tunesmith.profiles.rules.first_profile import (
    MIN_CASES,
    at_least,
    choose_shares,
    longest_answer,
    longest_example,
    role_for,
    tier_of,
)
from tunesmith.profiles.sections.experience import Mix
from tunesmith.profiles.whole_base import read_whole_base
from tunesmith.profiles.workspace import init_workspace
from tunesmith.programs.device.gpu import find_gpu
from tunesmith.training.trainers.sim.files import safetensors_bytes
from tunesmith.triggers.new_data import NewDataSettings


def a_whole_base(folder: Path) -> Path:
    """A base that lacks nothing, as far as its files tell."""
    a_base(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def a_first_profile(tmp_path: Path, **changes: Any) -> FirstProfile:
    made = first_profile(StartWish("support", a_whole_base(tmp_path / "base")), tmp_path / "ws")
    return dataclasses.replace(made, **changes)


def test_first_round_of_the_defaults_can_be_trained_and_judged() -> None:
    num, min_new = NewDataSettings().count, Mix().min_new
    shares = choose_shares(num, min_new)
    assert shares is not None
    draw = random.Random(1)
    rounds = 2000
    judged = 0
    for _ in range(rounds):
        places = [draw.random() for _ in range(num)]
        held_out = sum(place < shares.heldout for place in places)
        trained = sum(place >= shares.heldout + shares.validation for place in places)
        judged += held_out >= shares.min_cases and trained >= min_new
    assert judged / rounds > 0.95
    assert at_least(50, num, 0.1) < 1e-9, "the plain defaults would hold every first round"


@settings(deadline=None)
@given(num=st.integers(1, 400), min_new=st.integers(1, 200), min_cases=st.integers(2, 60))
def test_chosen_share_is_the_smallest_that_does(num: int, min_new: int, min_cases: int) -> None:
    shares = choose_shares(num, min_new, min_cases)
    if shares is None:
        assert at_least(min_cases, num, 0.5) < 0.95 or at_least(min_new, num, 1 - 0.5 - 0.05) < 0.95
        return
    assert 0 < shares.heldout <= 0.5
    assert at_least(min_cases, num, shares.heldout) >= 0.95
    assert at_least(min_new, num, 1 - shares.heldout - shares.validation) >= 0.95
    if shares.heldout > 0.05:
        assert at_least(min_cases, num, shares.heldout - 0.05) < 0.95


@given(wanted=st.integers(0, 60), num=st.integers(0, 60), share=st.floats(0.01, 0.99))
def test_probability_is_one_and_falls_with_what_is_wanted(wanted: int, num: int, share: float) -> None:
    found = at_least(wanted, num, share)
    assert -1e-9 <= at_least(wanted + 1, num, share) <= found + 1e-9 <= 1 + 2e-9
    assert at_least(0, num, share) == pytest.approx(1.0)


@given(context=st.integers(16, 1_000_000))
def test_lengths_fit_the_context(context: int) -> None:
    assert longest_example(context) <= min(context, 2048)
    assert 1 <= longest_answer(context) <= min(256, context // 2)


@pytest.mark.parametrize(
    ("gb", "tier"),
    [(None, "cpu"), (7.6, "small-gpu"), (11.9, "small-gpu"), (15.7, "consumer-gpu"), (31.4, "consumer-gpu"),
     (39.4, "datacenter-gpu"), (139.8, "datacenter-gpu")],
)  # fmt: skip
def test_tier_follows_from_the_memory_of_the_gpu(gb: float | None, tier: str) -> None:
    assert tier_of(gb) == tier


def test_every_family_has_a_role() -> None:
    assert {role_for(family) for role in Role for family in FAMILIES[role]} == {Role.ASSISTANT, Role.CODER}
    assert role_for("starcoder2") is Role.CODER
    assert role_for("bert") is None


def test_text_is_a_short_profile_that_says_what_was_decided(tmp_path: Path) -> None:
    made = a_first_profile(tmp_path)
    text = made.text()
    profile = Profile.model_validate(yaml.safe_load(text))
    assert (profile.name, profile.role, profile.base.family) == ("support", "assistant", "llama")
    assert profile.base.path == str(tmp_path / "base")
    assert (profile.base.context, profile.recipe.max_length) == (4096, 2048)
    assert (profile.data.heldout_share, profile.gate.min_cases) == (made.shares.heldout, MIN_CASES)
    assert (
        profile.campaign.triggers == Profile.model_validate({**yaml.safe_load(text), "campaign": {}}).campaign.triggers
    ), "the triggers stay the defaults"
    assert profile.answers.max_tokens == 256
    lines = text.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 120


@settings(deadline=None, max_examples=25)
@given(path=st.text(st.characters(exclude_characters="\x00", codec="utf-8"), min_size=1, max_size=80))
def test_any_path_is_read_back_as_it_is(path: str) -> None:
    made = _EXAMPLE.setdefault("profile", _make_example())
    text = dataclasses.replace(made, base_path=path).text()
    assert yaml.safe_load(text)["base"]["path"] == path


_EXAMPLE: dict[str, FirstProfile] = {}


def _make_example() -> FirstProfile:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return a_first_profile(Path(folder))


@pytest.mark.parametrize("task", ["123", "true", "null", "1e3", "0x1f", "on", "a.b", "2026-01-01"])
def test_task_that_yaml_reads_as_something_else_stays_a_text(tmp_path: Path, task: str) -> None:
    assert yaml.safe_load(a_first_profile(tmp_path, task=task).text())["name"] == task
    if task == "1e3":  # our own reader takes it for a number
        assert f'name: "{task}"' in a_first_profile(tmp_path, task=task).text()


def test_profile_for_another_machine_takes_its_tier_for_granted(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "base")
    text = first_profile(StartWish("support", base, tier=HardwareTier.CONSUMER_GPU), tmp_path / "ws").text()
    assert yaml.safe_load(text)["hardware"] == {"tier": "consumer-gpu"}
    assert "of 24.0 GB (tier consumer-gpu)" in text
    small = a_first_profile(tmp_path, tier=HardwareTier.SMALL_GPU, memory_gb=7.0, revision="abc").text()
    said = Profile.model_validate(yaml.safe_load(small))
    assert (said.hardware.memory_gb, said.base.revision) == (7.0, "abc")


def test_base_in_the_workspace_is_named_relative_to_it(tmp_path: Path) -> None:
    workspace = init_workspace(tmp_path / "ws")
    base = a_whole_base(workspace.root / "models" / "tiny")
    assert first_profile(StartWish("support", base), workspace.root).base_path == "models/tiny"


@pytest.mark.parametrize("task", ["", "Support", "a b", "../x", "a/b", "x" * 64, "-a", ".a", "ä", "a\n"])
def test_task_that_cannot_name_a_profile_is_refused(task: str) -> None:
    with pytest.raises(UsageError, match="cannot name a model"):
        check_task(task)


def test_unknown_tier_and_role_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'datacenter-gpu'"):
        named(HardwareTier, "datacentre-gpu", "--tier")
    assert named(Role, None, "--role") is None
    base = a_whole_base(tmp_path / "base")
    (base / "config.json").write_text(json.dumps({**BASE_CONFIG, "model_type": "bert"}))
    with pytest.raises(ConfigError, match=r"its family 'bert' is not supported; supported: gemma, "):
        first_profile(StartWish("support", base), tmp_path)
    (base / "config.json").write_text(json.dumps({**BASE_CONFIG, "model_type": "gemma"}))
    with pytest.raises(ConfigError, match="is not supported for role coder"):
        first_profile(StartWish("support", base, role=Role.CODER), tmp_path)


def test_base_that_does_not_fit_names_smaller_and_larger_ways_out(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "base")
    huge = {**BASE_CONFIG, "hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_hidden_layers": 400}
    (base / "config.json").write_text(json.dumps(huge))
    with pytest.raises(ConfigError, match=r"does not fit small-gpu to be trained: .*--tier datacenter-gpu"):
        first_profile(StartWish("support", base, tier=HardwareTier.SMALL_GPU), tmp_path)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{")


def _only(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(b"x")

    return change


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "chat_template.jinja").unlink(), r"no chat template.*instruct or chat version"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer.*copy the tokenizer files"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json; name the folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (_only("tiny.Q4_K_M.gguf"), r"holds GGUF files .*docs/start\.md"),
        (_only("pytorch_model.bin"), r"pickled weights .* are never loaded"),
        (_cut, r"has \d+ bytes, and its header says \d+; fetch it again"),
        (_no_header, "not a whole safetensors file; fetch it again"),
        (_missing_shard, "cannot be read|no such file"),
        (_adapter, "holds an adapter"),
    ],
)
def test_folder_that_is_no_whole_base_says_what_to_do(tmp_path: Path, change: Any, said: str) -> None:
    base = a_whole_base(tmp_path / "base")
    change(base)
    with pytest.raises(ConfigError, match=said):
        read_whole_base(base)


def test_file_or_nothing_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a GGUF file; GGUF files are for serving"):
        read_whole_base(tmp_path / "tiny.gguf")
    (tmp_path / "weights.safetensors").write_bytes(safetensors_bytes({"a": ([1], [0.5])}))
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        read_whole_base(tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match="no such folder; name the folder"):
        read_whole_base(tmp_path / "missing")


def test_time_zone_of_the_machine_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = tmp_path / "zoneinfo" / "Europe" / "Berlin"
    zone.parent.mkdir(parents=True)
    zone.touch()
    (tmp_path / "localtime").symlink_to(zone)
    monkeypatch.delenv("TZ", raising=False)
    assert local_zone(tmp_path / "localtime") == "Europe/Berlin"
    assert local_zone(tmp_path / "missing") == "UTC"
    monkeypatch.setenv("TZ", "America/New_York")
    assert local_zone(tmp_path / "localtime") == "America/New_York"
    monkeypatch.setenv("TZ", "Etc/UTC")
    assert local_zone(tmp_path / "localtime") == "UTC"
    monkeypatch.setenv("TZ", "nowhere/at all")
    assert local_zone(tmp_path / "localtime") == "Europe/Berlin"


def test_machine_without_a_gpu_device_is_asked_nothing(tmp_path: Path) -> None:
    assert find_gpu(tmp_path) is None
