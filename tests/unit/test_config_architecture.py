"""Facts of a base model come from its own files, or it is refused with the file and the reason."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from support.config import TENSORS, a_base, a_workspace, write_safetensors
from tunesmith.core.errors import ConfigError
from tunesmith.profiles.architecture import adaptable_modules, read_architecture, read_tensor_shapes
from tunesmith.profiles.rules.lock import ArchitectureLock

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATE_HASH = hashlib.sha256(TEMPLATE.encode()).hexdigest()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return a_base(a_workspace(tmp_path))


def test_architecture_read_from_config(base: Path) -> None:
    assert read_architecture(base) == ArchitectureLock(
        architecture="LlamaForCausalLM",
        family="llama",
        vocab_size=320,
        context=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    )


def test_architecture_without_kv_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    assert read_architecture(a_base(a_workspace(tmp_path), num_key_value_heads=None)).num_kv_heads == 4


def test_chat_template_hash_is_of_the_text_wherever_it_is_kept(base: Path) -> None:
    assert read_architecture(base).chat_template_sha256 is None
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert read_architecture(base).chat_template_sha256 == TEMPLATE_HASH
    (base / "chat_template.jinja").write_text("another")
    assert read_architecture(base).chat_template_sha256 == hashlib.sha256(b"another").hexdigest()
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (base / "tokenizer_config.json").unlink()
    assert read_architecture(base).chat_template_sha256 == TEMPLATE_HASH


def test_chat_template_list_is_hashed_too(base: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "x"}]
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    first = read_architecture(base).chat_template_sha256
    templates[1]["template"] = "y"
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_architecture(base).chat_template_sha256 != first


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map, so it needs code of its own"),
        ({"architectures": None}, "exactly one model class"),
        ({"architectures": []}, "exactly one model class"),
        ({"architectures": [3]}, "exactly one model class"),
        ({"model_type": None}, "no 'model_type'"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"vocab_size": 0}, "has a bad 'vocab_size'"),
        ({"vocab_size": True}, "has a bad 'vocab_size'"),
        ({"max_position_embeddings": "512"}, "has a bad 'max_position_embeddings'"),
        ({"hidden_size": -1}, "has a bad 'hidden_size'"),
        ({"num_hidden_layers": 2.0}, "has a bad 'num_hidden_layers'"),
        ({"num_attention_heads": 10**30}, "has a bad 'num_attention_heads'"),
    ],
)
def test_architecture_wrong_config_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = a_base(a_workspace(tmp_path), **changes)
    with pytest.raises(ConfigError) as caught:
        read_architecture(folder)
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_architecture_tokenizer_with_code_refused(base: Path) -> None:
    (base / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has auto_map"):
        read_architecture(base)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b" " * ((1 << 20) + 1), "larger than 1 MiB"),
    ],
)
def test_architecture_broken_config_file_refused(base: Path, content: bytes, reason: str) -> None:
    (base / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_architecture(base)


def test_architecture_missing_folder_or_config_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder; put the model there or mend base\.path"):
        read_architecture(base / "nowhere")
    (base / "config.json").unlink()
    with pytest.raises(ConfigError, match="is this folder a model in Hugging Face format"):
        read_architecture(base)


def test_tensor_shapes_from_one_file_and_from_shards(base: Path) -> None:
    whole = read_tensor_shapes(base)
    assert whole == {name: tuple(shape) for name, shape in TENSORS.items()}
    (base / "model.safetensors").unlink()
    names = sorted(TENSORS)
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        write_safetensors(base / file, {name: TENSORS[name] for name in names if files[name] == file})
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_tensor_shapes(base) == whole


def test_adaptable_modules_are_matrices_only() -> None:
    shapes = {name: tuple(shape) for name, shape in TENSORS.items()} | {"lm_head.bias": (320, 2)}
    assert adaptable_modules(shapes) == {
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.mlp.gate_proj",
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 7) + b'{"a":1}',
        b"PK\x03\x04 a pickle in a zip, as torch.save writes it",
    ],
)
def test_tensor_shapes_broken_file_refused(base: Path, content: bytes) -> None:
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors file; fetch it again"):
        read_tensor_shapes(base)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "missing.safetensors", "..", "a/b"])
def test_tensor_shapes_index_naming_other_files_refused(base: Path, name: str) -> None:
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x.weight": name}}))
    with pytest.raises(ConfigError, match=r"outside its folder|cannot be read"):
        read_tensor_shapes(base)


def test_tensor_shapes_pipe_refused_without_hanging(base: Path) -> None:
    (base / "model.safetensors").unlink()
    os.mkfifo(base / "model.safetensors")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_tensor_shapes(base)


def test_tensor_shapes_without_safetensors_refused(base: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="save its weights as safetensors"):
        read_tensor_shapes(base)


def test_architecture_of_a_model_that_transformers_saved(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "one")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "many", max_shard_size="40KB")
    lock = read_architecture(tmp_path / "one")
    assert (lock.architecture, lock.family, lock.vocab_size, lock.context) == ("LlamaForCausalLM", "llama", 300, 256)
    assert (lock.num_layers, lock.num_heads, lock.num_kv_heads, lock.hidden_size) == (2, 4, 2, 32)
    assert lock == read_architecture(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert read_tensor_shapes(tmp_path / "one") == read_tensor_shapes(tmp_path / "many")
    assert "model.layers.1.self_attn.q_proj" in adaptable_modules(read_tensor_shapes(tmp_path / "one"))
