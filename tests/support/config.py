"""Builders for the config tests: a workspace with one profile, a base model folder without weights worth reading."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tunesmith.profiles.workspace import Workspace, init_workspace

HEAD = "name: dates\nrole: extractor\nbase:\n  path: models/tiny\n  family: llama\n"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

TENSORS = {
    "model.embed_tokens.weight": [320, 64],
    "model.layers.0.self_attn.q_proj.weight": [64, 64],
    "model.layers.0.self_attn.v_proj.weight": [32, 64],
    "model.layers.0.mlp.gate_proj.weight": [128, 64],
    "model.layers.0.input_layernorm.weight": [64],
}


def a_workspace(folder: Path, profile: str = "", project: str | None = None) -> Workspace:
    """A workspace whose profile `dates` says `profile` below the required keys."""
    workspace = init_workspace(folder / "workspace")
    write_profile(workspace, profile)
    if project is not None:
        workspace.project_file.write_text(project, encoding="utf-8")
    return workspace


def write_profile(workspace: Workspace, body: str | bytes, head: str = HEAD, name: str = "dates") -> None:
    content = body if isinstance(body, bytes) else (head + body).encode()
    (workspace.profiles_dir / f"{name}.yaml").write_bytes(content)


def a_base(workspace: Workspace, tensors: dict[str, list[int]] | None = None, **changes: Any) -> Path:
    """A folder that looks like a model: config.json (a value None removes the key) and a safetensors header."""
    folder = workspace.root / "models" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", TENSORS if tensors is None else tensors)
    return folder


def write_safetensors(path: Path, tensors: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
