"""Adapters: the same bytes every time, whole or refused, and nothing in a folder is ever executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from native_builders import a_micro_base, a_recipe
from tunesmith.errors import ConfigError, DataError
from tunesmith.modeling.adapters import (
    adapter_norms,
    detach,
    load_adapter,
    new_adapter,
    num_nonfinite,
    save_adapter,
    trained_parameters,
)
from tunesmith.modeling.loading import load_base, load_tokenizer

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


def test_norms_are_those_of_the_change_of_weights(tmp_path: Path) -> None:
    adapted = new_adapter(load_base(a_micro_base(tmp_path / "base"), CPU), a_recipe())
    assert set(adapter_norms(adapted).values()) == {0.0}
    disturb(adapted)
    name = "model.layers.0.self_attn.q_proj"
    layer = adapted.get_base_model().get_submodule(name)
    change = layer.get_delta_weight("default").detach()
    assert adapter_norms(adapted)[name] == pytest.approx(float(change.norm()), rel=1e-5)


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


def test_disk_that_is_full_is_told_as_such(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the same path through the library, another number."""
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; "
        "from tunesmith.modeling.tensor_files import write_tensors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))\n"
        "try:\n    write_tensors(Path(sys.argv[1]), {'a': torch.zeros(100_000)})\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EFBIG)]
