"""Memory is planned before it is needed: shown by `plan`, kept by a real training, learnt from by the next one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.fleet import MakeFleet
from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_recipe,
    a_train_spec,
    adapter_ref,
    events_of,
    pair_rows,
    small_rows,
    train_here,
    weights_of,
)
from support.workspaces import Ended, a_jsonl, a_workspace
from tunesmith.cli.main import call
from tunesmith.cli.run_page import note_of
from tunesmith.client import Client
from tunesmith.core.errors import ConfigError
from tunesmith.profiles.architecture import read_shape
from tunesmith.profiles.profile import Method
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.protocol import Log
from tunesmith.runs.spec import BaseModelRef, DatasetRef

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra

Tell = Callable[..., Ended]
QWEN_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
GPU = {"tier": "consumer-gpu"}
QUICK = {"method": "sft", "max_length": 256, "batch_tokens": 256, "max_steps": 4, "epochs": 50, "lora_rank": 2}


def a_large_base(folder: Path) -> None:
    """Config and headers of a model of 0.6B parameters: all that a plan reads. There is not a single weight."""
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [151_936, 1024], "model.norm.weight": [1024]}
    sizes = {"q": [2048, 1024], "k": [1024, 1024], "v": [1024, 1024], "o": [1024, 2048]}
    for layer in range(28):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{one}_proj.weight": shape for one, shape in sizes.items()}
        shapes |= {f"{name}.mlp.{one}_proj.weight": [3072, 1024] for one in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": [1024, 3072], f"{name}.self_attn.q_norm.weight": [128]}
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    (folder / "config.json").write_text(json.dumps(QWEN_600M))


@pytest.fixture
def client(tmp_path: Path) -> Client:
    recipe = {"lora_dropout": 0.0, "batch_tokens": 32_768}
    base = {"path": "models/tiny", "family": "qwen3"}
    made = a_workspace(tmp_path, "native", profile={"hardware": GPU, "recipe": recipe, "base": base})
    a_large_base(made.workspace.root / "models" / "tiny")
    return made


@pytest.fixture
def tell(client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    monkeypatch.chdir(client.workspace.root)

    def tell(*words: str, code: int = 0) -> Ended:
        began = time.monotonic()
        end = Ended(call(words), *capsys.readouterr(), time.monotonic() - began)
        assert end.code == code, end
        return end

    return tell


# ---- the command ----------------------------------------------------------------------------------------------------


def test_plan_of_a_profile_shows_passes_parts_and_what_they_rest_on_in_80_columns(tell: Tell) -> None:
    page = tell("plan", "support").out
    for words in (
        "native · sft · consumer-gpu",
        "24.0 GB (tier consumer-gpu)",
        "no earlier run",
        "weights",
        "forecast",
    ):
        assert words in page
    assert re.search(r"of up to \d+ tokens, 0 of 28 layers activation-checkpointed", page)
    assert max(map(len, page.splitlines())) <= 80, page


def test_plan_on_files_tells_steps_and_time_and_keeps_nothing(client: Client, tell: Tell) -> None:
    data = a_jsonl(client.workspace.root / "data.jsonl", 300)
    made = tell("plan", "support", str(data), "--json").json
    assert made["schedule"]["num_examples"] == pytest.approx(300 * 0.65, rel=0.3)
    assert made["schedule"]["num_steps"] >= 1
    assert made["memory"]["plan"]["forecast"]["total"] < 24 * 2**30
    assert client.datasets.list() == []
    assert list(client.workspace.datasets_dir.glob("*")) == []
    assert "example" in tell("plan", "support", str(data)).out


def test_plan_knows_a_dataset_by_id_and_pairs_by_their_kind(client: Client, tell: Tell, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in pair_rows(60)))
    dataset, _ = client.datasets.prepare("support", [pairs])
    made = tell("plan", "support", dataset.id, "--json").json
    assert (made["method"], made["schedule"]["num_examples"]) == ("orpo", dataset.counts["train"])
    assert tell("plan", "support", "ds-000000000000", code=1).err.startswith("error: no dataset")


def test_plan_follows_the_limit_of_the_profile_and_says_whose_it_is(tell: Tell) -> None:
    large = tell("plan", "support", "--json").json["memory"]
    small = tell("plan", "support", "--set", "hardware.memory_gb=8", "--json").json["memory"]
    assert small["device_basis"] == "hardware.memory_gb"
    assert small["plan"]["pack_tokens"] < large["plan"]["pack_tokens"]
    tight = tell("plan", "support", "--set", "hardware.memory_gb=3", "--json").json["memory"]["plan"]
    assert 0 < tight["checkpointed_layers"] <= 28
    assert tight["forecast"]["total"] <= 3 * 2**30


def test_plan_of_what_cannot_fit_is_refused_with_what_to_change(tell: Tell) -> None:
    refused = tell("plan", "support", "--set", "hardware.memory_gb=1", "--set", "recipe.lora_rank=256", code=1)
    assert refused.out == ""
    for hint in ("profile support", "of 1.0 GB", "recipe.quantize: nf4", "recipe.lora_rank (256)"):
        assert hint in refused.err
    as_json = tell("plan", "support", "--set", "hardware.memory_gb=1", "--json", code=1)
    assert json.loads(as_json.err)["error"]["code"] == "config"


def test_plan_without_a_profile_is_the_queue_and_refuses_settings(tell: Tell) -> None:
    assert "Nothing is waiting" in tell("plan").out
    assert "name a profile" in tell("plan", "--set", "recipe.lr=1", code=2).err
    assert "did you mean 'support'?" in tell("plan", "suport", code=1).err


def test_plan_of_a_trainer_with_rules_of_its_own_says_so(tell: Tell) -> None:
    assert "Trainer sim makes no memory plan" in tell("plan", "support", "--set", "trainer.kind=sim").out


def test_submit_says_in_one_line_how_the_device_will_be_used(client: Client, tell: Tell) -> None:
    data = a_jsonl(client.workspace.root / "data.jsonl")
    assert re.search(
        r"^memory: about .* GB of 24.0 GB \(tier consumer-gpu\)", tell("run", "submit", "support", str(data)).out, re.M
    )
    tight = tell("run", "submit", "support", str(data), "--set", "hardware.memory_gb=0.5").out
    assert "memory: will not fit (hardware.memory_gb)" in tight


# ---- a real training ------------------------------------------------------------------------------------------------


def test_training_records_forecast_and_peak_and_the_next_one_is_corrected_by_them(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer="native", profile={"recipe": QUICK, "gate": {"min_cases": 2}})
    a_micro_base(fleet.root / "models" / "tiny")
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    first = fleet.submit(lines=60)
    fleet.work("train", timeout_s=90)
    (attempt,) = fleet.attempts(first)
    assert attempt.outcome == "succeeded", attempt.error
    assert fleet.spec(first, attempt)["memory_corrections"] == {}
    assert attempt.result is not None
    memory = attempt.result["detail"]["memory"]
    assert memory["measured_bytes"] > 50 * 2**20
    assert memory["forecast"]["total"] > memory["forecast"]["process"] > 50 * 2**20
    assert memory["ratio"] > 0
    assert (memory["pack_tokens"], memory["checkpointed_layers"]) == (4096, 0)
    assert re.search(r"\d+ MB of memory \(\d+ MB predicted\)", note_of(fleet.client.runs.show(first).attempts[0]))
    said = [event["message"] for event in fleet.program_events(first, attempt) if event["type"] == "log"]
    assert sum(message.startswith("memory:") for message in said) == 2

    second = fleet.submit(lines=60)
    fleet.work("train", timeout_s=90)
    (attempt,) = fleet.attempts(second)
    correction = min(2.0, max(0.5, memory["ratio"]))
    assert fleet.spec(second, attempt)["memory_corrections"] == {memory["key"]: correction}
    assert attempt.result is not None
    assert attempt.result["detail"]["memory"]["correction"] == correction
    outlook = fleet.client.profiles.plan("support").memory
    assert outlook is not None
    assert (outlook.plan.key, outlook.num_earlier) == (memory["key"], 2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("memory") / "base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("memory") / "data", small_rows(40))


def logs_of(folder: Path) -> Sequence[str]:
    return [event.message for event in events_of(folder) if isinstance(event, Log)]


def test_oversized_training_is_refused_before_a_weight_is_read(data: DatasetRef, tmp_path: Path) -> None:
    """Its weights are cut off behind the header: whoever loads them hears that instead."""
    folder = a_micro_base(tmp_path / "base")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: 8 + int.from_bytes(weights[:8], "little")])
    spec = a_train_spec(a_base_ref(folder), data, memory_gb=0.001)
    with pytest.raises(ConfigError, match=r"needs .* at the least .* may use 1 MB of 1 MB: .*hardware\.memory_gb"):
        train_here(spec, tmp_path / "out")


def test_after_running_out_of_memory_passes_are_half_as_large_and_learn_the_same(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    recipe = a_recipe(max_steps=3, lora_dropout=0.0, micro_batch_tokens=None)
    found = {}
    for divisor in (1, 2):
        result = train_here(a_train_spec(base, data, recipe=recipe, divisor=divisor), tmp_path / str(divisor))
        found[divisor] = result.detail["memory"]
    assert (found[1]["pack_tokens"], found[2]["pack_tokens"]) == (4096, 2048)
    assert any("ran out of memory with passes of 4096 tokens" in line for line in logs_of(tmp_path / "2"))
    assert weights_of(tmp_path / "1") == weights_of(tmp_path / "2"), "steps of 200 tokens never filled a pass"


def test_embeddings_that_are_trained_after_all_are_planned_for(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    """Only what the run starts from says that they are; the plan from before knew nothing of it."""
    recipe = a_recipe(max_steps=1, train_embeddings=True)
    first = train_here(a_train_spec(base, data, recipe=recipe), tmp_path / "first")
    start = adapter_ref(tmp_path / "first", first)
    spec = a_train_spec(base, data, recipe=a_recipe(max_steps=1, train_embeddings="auto"), start=start)
    again = train_here(spec, tmp_path / "second")
    trained = [result.detail["memory"]["forecast"]["trained"] for result in (first, again)]
    assert trained[0] == trained[1] > 16 * base.lock.vocab_size * base.lock.hidden_size
    assert sum("predicted of" in line for line in logs_of(tmp_path / "second")) == 2


def test_cap_of_the_profile_is_what_the_passes_keep_to(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    recipe = a_recipe(max_steps=1, micro_batch_tokens=64)
    assert train_here(a_train_spec(base, data, recipe=recipe), tmp_path / "out").detail["memory"]["pack_tokens"] == 64


@pytest.mark.parametrize("method", [Method.SFT, Method.ORPO])
def test_plan_at_run_time_knows_what_the_data_asks_for(base: BaseModelRef, tmp_path: Path, method: Method) -> None:
    pairs = a_dataset(tmp_path / "pairs", pair_rows(40))
    spec = a_train_spec(base, pairs, recipe=a_recipe(max_steps=1, method=method), method=method)
    memory: dict[str, Any] = train_here(spec, tmp_path / "out").detail["memory"]
    assert f"-{method}-" in memory["key"]
    assert memory["key"].endswith("-cpu-plain")
    assert 0 < memory["forecast"]["activations"] < 2**30


def test_shape_is_read_from_config_and_headers_alone(tmp_path: Path) -> None:
    a_large_base(tmp_path)
    shape = read_shape(tmp_path)
    assert (shape.head_size, shape.has_qk_norm, shape.is_tied) == (128, True, True)
    assert shape.num_parameters == 151_936 * 1024 + 1024 + 28 * (shape.num_in_layer + 128)
