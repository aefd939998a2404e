"""Adapters: the same bytes every time, whole or refused, and nothing in a folder is ever executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.native import a_micro_base, a_recipe
from support.quick_processes import run_code
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.models.adapters import (
    adapter_norms,
    detach,
    load_adapter,
    new_adapter,
    num_nonfinite,
    read_config,
    save_adapter,
    start_differences,
    trained_parameters,
)
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.programs.weights import weights_problem

CPU = torch.device("cpu")
IDS = torch.arange(20, 60).view(2, 20)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base_folder(request: Any, tmp_path: Path) -> Path:
    return a_micro_base(tmp_path / "base", tied=request.param)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def disturb(adapted: Any) -> None:
    """As if trained."""
    torch.manual_seed(5)
    with torch.no_grad():
        for _, tensor in trained_parameters(adapted):
            tensor.add_(torch.randn_like(tensor) * 0.1)


def an_adapter(base: Path, folder: Path, *, embeddings: bool = False) -> Path:
    torch.manual_seed(4)
    adapted = new_adapter(load_base(base, CPU), a_recipe(train_embeddings=embeddings))
    disturb(adapted)
    save_adapter(adapted, folder, "base")
    return folder


@pytest.mark.parametrize("embeddings", [False, True])
def test_saved_adapter_loads_to_the_same_model(base_folder: Path, tmp_path: Path, embeddings: bool) -> None:
    adapted = new_adapter(load_base(base_folder, CPU), a_recipe(train_embeddings=embeddings))
    disturb(adapted)
    save_adapter(adapted, tmp_path / "adapter", "base")
    again = load_adapter(load_base(base_folder, CPU), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))


def test_saved_adapter_has_the_same_bytes_every_time(base_folder: Path, tmp_path: Path) -> None:
    first, second = (an_adapter(base_folder, tmp_path / name, embeddings=True) for name in ("a", "b"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_saved_adapter_loads_with_peft_itself(base_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = new_adapter(load_base(base_folder, CPU), a_recipe(train_embeddings=True))
    disturb(adapted)
    save_adapter(adapted, tmp_path / "adapter", "base")
    theirs = PeftModel.from_pretrained(load_base(base_folder, CPU), str(tmp_path / "adapter"))
    assert torch.equal(logits(theirs), logits(adapted))


def test_tied_embeddings_stay_tied_while_trained(tmp_path: Path) -> None:
    base = load_base(a_micro_base(tmp_path / "base", tied=True), CPU)
    adapted = new_adapter(base, a_recipe(train_embeddings=True))
    disturb(adapted)
    model = adapted.get_base_model()
    inner = model.get_input_embeddings().modules_to_save["default"].weight
    outer = model.get_output_embeddings().modules_to_save["default"].weight
    assert inner is outer


VARIANTS: list[dict[str, Any]] = [
    {"dora": True},
    {"rslora": True},
    {"dora": True, "rslora": True, "train_embeddings": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_of_lora_are_saved_loaded_detached_and_judged(
    base_folder: Path, tmp_path: Path, variant: dict[str, Any]
) -> None:
    from peft import PeftModel

    torch.manual_seed(4)
    base = load_base(base_folder, CPU)
    before = logits(base)
    adapted = new_adapter(base, a_recipe(**variant))
    save_adapter(adapted, tmp_path / "fresh", "base")
    disturb(adapted)
    after = logits(adapted)
    save_adapter(adapted, tmp_path / "adapter", "base")
    assert torch.equal(logits(load_adapter(load_base(base_folder, CPU), tmp_path / "adapter")), after)
    theirs = PeftModel.from_pretrained(load_base(base_folder, CPU), str(tmp_path / "adapter"))
    assert torch.equal(logits(theirs), after)
    assert torch.equal(logits(detach(adapted)), before)
    fresh, trained = (tmp_path / name / "adapter_model.safetensors" for name in ("fresh", "adapter"))
    assert weights_problem(trained) is None
    assert weights_problem(trained, start=fresh) is None
    assert "nothing was learnt" in str(weights_problem(fresh))
    assert any("lora_magnitude_vector" in name for name in load_file(trained)) == variant.get("dora", False)
    trained_weights = load_file(trained)
    trained_weights[max(trained_weights)].flatten()[0] = float("nan")
    save_file(trained_weights, trained)
    assert "NaN" in str(weights_problem(trained))


@pytest.mark.parametrize("variant", [{}, {"rslora": True}, {"dora": True}, {"dora": True, "rslora": True}], ids=str)
def test_norms_are_those_of_the_change_of_weights(tmp_path: Path, variant: dict[str, Any]) -> None:
    base = load_base(a_micro_base(tmp_path / "base"), CPU)
    name = "model.layers.0.self_attn.q_proj"
    before = base.get_submodule(name).weight.detach().clone()
    adapted = new_adapter(base, a_recipe(lora_dropout=0.0, **variant))
    assert max(adapter_norms(adapted).values()) < 1e-6
    disturb(adapted)
    measured = adapter_norms(adapted)[name]
    layer = adapted.get_base_model().get_submodule(name)
    layer.merge()
    assert measured == pytest.approx(float((layer.base_layer.weight - before).norm()), rel=1e-5)


def test_resolved_embeddings_are_the_outputs_where_they_are_not_tied(tmp_path: Path) -> None:
    untied = a_micro_base(tmp_path / "untied", tied=False)
    cases: list[tuple[bool | str, bool | None, list[str]]] = [
        ("auto", True, ["lm_head"]),
        (True, True, ["embed_tokens", "lm_head"]),
        ("auto", False, []),
        (True, None, ["embed_tokens", "lm_head"]),
        ("auto", None, []),
    ]
    for said, resolved, expected in cases:
        adapted = new_adapter(load_base(untied, CPU), a_recipe(train_embeddings=said), train_embeddings=resolved)
        saved = [name.split(".")[-4] for name, _ in trained_parameters(adapted) if "modules_to_save" in name]
        assert sorted(saved) == expected
    tied = load_base(a_micro_base(tmp_path / "tied", tied=True), CPU)
    adapted = new_adapter(tied, a_recipe(train_embeddings="auto"), train_embeddings=True)
    assert sum("modules_to_save" in name for name, _ in trained_parameters(adapted)) == 1  # one matrix for both
    assert len([name for name in adapted.state_dict() if "modules_to_save" in name]) == 2


def test_output_embeddings_alone_survive_saving(tmp_path: Path) -> None:
    folder = a_micro_base(tmp_path / "base", tied=False)
    adapted = new_adapter(load_base(folder, CPU), a_recipe(), train_embeddings=True)
    disturb(adapted)
    save_adapter(adapted, tmp_path / "adapter", "base")
    assert not any("embed_tokens" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert torch.equal(logits(load_adapter(load_base(folder, CPU), tmp_path / "adapter")), logits(adapted))


# ---- starting from an adapter ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """A base, and the config of an adapter of it."""
    folder = tmp_path_factory.mktemp("started")
    base = a_micro_base(folder / "base", tied=False)
    return load_base(base, CPU), read_config(an_adapter(base, folder / "adapter", embeddings=True))


@pytest.mark.parametrize("embeddings", [True, "auto"])
def test_recipe_that_made_the_adapter_has_no_differences(
    started: tuple[Any, dict[str, Any]], embeddings: bool | str
) -> None:
    base, config = started
    assert start_differences(a_recipe(train_embeddings=embeddings), config, base) == []
    same = ("q_proj", "k_proj", "v_proj", "self_attn.o_proj", "gate_proj", "up_proj", "mlp.down_proj")
    assert start_differences(a_recipe(train_embeddings=embeddings, target_modules=same), config, base) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"lora_rank": 8}, "recipe.lora_rank is 8, but the adapter that the run starts from has 4; set it to that"),
        ({"lora_alpha": 8.0}, "recipe.lora_alpha is 8.0, but"),
        ({"rslora": True}, "recipe.rslora is True, but"),
        ({"dora": True}, "recipe.dora is True, but"),
        ({"train_embeddings": False}, "recipe.train_embeddings is False, but"),
        ({"target_modules": ("q_proj", "v_proj")}, "recipe.target_modules is q_proj, v_proj, but"),
    ],
)
def test_field_in_which_the_recipe_differs_from_the_start_is_named(
    started: tuple[Any, dict[str, Any]], change: dict[str, Any], line: str
) -> None:
    base, config = started
    (found,) = start_differences(a_recipe(**({"train_embeddings": True} | change)), config, base)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": "all"}, "bias 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_modules": r".*q_proj"}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "target_modules is all-linear"),
    ],
)
def test_start_that_no_recipe_can_describe_is_named(
    started: tuple[Any, dict[str, Any]], change: dict[str, Any], words: str
) -> None:
    base, config = started
    (found,) = start_differences(a_recipe(), config | change, base)
    assert words in found


def test_all_differences_are_named_at_once(started: tuple[Any, dict[str, Any]]) -> None:
    base, config = started
    recipe = a_recipe(lora_rank=8, dora=True, train_embeddings=False, target_modules=("q_proj",))
    assert len(start_differences(recipe, config, base)) == 4


# ---- nothing is executed, nothing half right is loaded --------------------------------------------------------------


def test_detached_base_is_as_before(base_folder: Path, tmp_path: Path) -> None:
    base = load_base(base_folder, CPU)
    before = logits(base)
    folder = an_adapter(base_folder, tmp_path / "adapter", embeddings=True)
    adapted = load_adapter(base, folder)
    assert not torch.equal(logits(adapted), before)
    bare = detach(adapted)
    assert torch.equal(logits(bare), before)
    assert torch.equal(logits(load_adapter(bare, folder)), logits(load_adapter(load_base(base_folder, CPU), folder)))


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "training_args.bin", "weights.pt", "x.PKL"])
def test_folder_with_a_pickle_is_refused_and_not_executed(base_folder: Path, tmp_path: Path, name: str) -> None:
    folder = an_adapter(base_folder, tmp_path / "adapter")
    (folder / name).write_bytes(pickle.dumps(Canary(str(tmp_path / "executed"))))
    with pytest.raises(DataError, match="pickled weights can run code"):
        load_adapter(load_base(base_folder, CPU), folder)
    assert not (tmp_path / "executed").exists()


def test_pickle_under_the_name_of_safetensors_is_refused_and_not_executed(base_folder: Path, tmp_path: Path) -> None:
    folder = an_adapter(base_folder, tmp_path / "adapter")
    hostile = pickle.dumps(Canary(str(tmp_path / "executed")))
    (folder / "adapter_model.safetensors").write_bytes(hostile)
    with pytest.raises(DataError, match="cannot be read"):
        load_adapter(load_base(base_folder, CPU), folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "does not describe a LoRA adapter"),
        ({"auto_mapping": {"base_model_class": "X", "parent_library": "os"}}, "auto_mapping"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"something_new": True}, "something_new"),
    ],
)
def test_config_with_what_we_do_not_load_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    base = a_micro_base(tmp_path / "base")
    folder = an_adapter(base, tmp_path / "adapter")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=words):
        load_adapter(load_base(base, CPU), folder)


def test_adapter_with_nan_is_refused(tmp_path: Path) -> None:
    base = a_micro_base(tmp_path / "base")
    folder = an_adapter(base, tmp_path / "adapter")
    weights = load_file(folder / "adapter_model.safetensors")
    next(iter(weights.values())).flatten()[3] = float("nan")
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(DataError, match="NaN"):
        load_adapter(load_base(base, CPU), folder)


def test_adapter_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    base = a_micro_base(tmp_path / "base")
    folder = an_adapter(base, tmp_path / "adapter")
    weights = load_file(folder / "adapter_model.safetensors")
    weights.pop(sorted(weights)[0])
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(DataError, match="does not belong to this base model"):
        load_adapter(load_base(base, CPU), folder)


def test_unknown_target_module_lists_what_there_is(tmp_path: Path) -> None:
    base = load_base(a_micro_base(tmp_path / "base"), CPU)
    with pytest.raises(ConfigError, match=r"no module 'c_attn'.*q_proj"):
        new_adapter(base, a_recipe(target_modules=("q_proj", "c_attn")))


def test_all_linear_leaves_the_output_head_alone(base_folder: Path) -> None:
    adapted = new_adapter(load_base(base_folder, CPU), a_recipe())
    assert all("lm_head" not in name for name, _ in trained_parameters(adapted))
    assert sum(1 for _ in trained_parameters(adapted)) == 2 * 2 * 7


@pytest.mark.parametrize("target", ["mlp", "input_layernorm"])
def test_target_module_without_a_matrix_is_refused_by_name(tmp_path: Path, target: str) -> None:
    base = load_base(a_micro_base(tmp_path / "base"), CPU)
    with pytest.raises(ConfigError, match=rf"'model\.layers\.0\.{target}' has no matrix; .*q_proj"):
        new_adapter(base, a_recipe(target_modules=(target,)))


def test_nonfinite_tensors_are_counted(tmp_path: Path) -> None:
    adapted = new_adapter(load_base(a_micro_base(tmp_path / "base"), CPU), a_recipe())
    assert num_nonfinite(adapted) == 0
    next(tensor for _, tensor in trained_parameters(adapted)).data[0, 0] = float("inf")
    assert num_nonfinite(adapted) == 1


def test_base_with_pickled_weights_only_is_refused_and_not_executed(tmp_path: Path) -> None:
    folder = a_micro_base(tmp_path / "base")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(str(tmp_path / "executed"))))
    with pytest.raises(ConfigError, match="safetensors"):
        load_base(folder, CPU)
    assert not (tmp_path / "executed").exists()


def test_base_that_brings_code_is_loaded_without_it(tmp_path: Path) -> None:
    folder = a_micro_base(tmp_path / "base")
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    path.write_text(json.dumps(config))
    load_base(folder, CPU)
    path.write_text(json.dumps(config | {"model_type": "evil"}))
    with pytest.raises(ConfigError):
        load_base(folder, CPU)
    assert not (tmp_path / "executed").exists()


def test_folder_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in refusal.value.message


@pytest.mark.slow
def test_disk_that_is_full_is_told_as_such(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the same path through the library, another number."""
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; "
        "from tunesmith.models.adapters import write_tensors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))\n"
        "try:\n    write_tensors(Path(sys.argv[1]), {'a': torch.zeros(100_000)})\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    done = run_code(code, tmp_path / "x", with_torch=True)
    assert done.stdout.split() == [str(errno.EFBIG)]
