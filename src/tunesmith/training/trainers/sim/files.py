"""What the sim trainer writes: small real safetensors in PEFT's layout, checkpoints, the artefact. No torch.

Weights are a function of seed, start and step, so that a resumed run ends with the same bytes as one never stopped.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.files import Manifest, publish_folder, verify_folder
from tunesmith.profiles.architecture import adaptable_modules, read_tensor_shapes
from tunesmith.profiles.base_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunesmith.runs.spec import TrainSpec

SIM_MARKER = "sim.json"
"""In an adapter folder: how good the sim evaluator shall find it."""
_RANK = 2
_MODULES = ("q_proj", "v_proj")


@dataclass
class SimState:
    """Where a sim training stands."""

    step: int = 0
    best_step: int = 0
    best_loss: float = float("inf")


def read_state(spec: TrainSpec) -> SimState:
    """From the checkpoint to resume from, verified; or the beginning."""
    if spec.resume is None:
        return SimState()
    folder = Path(spec.resume.path)
    verify_folder(folder, spec.resume.digest)
    return SimState(**json.loads((folder / "state.json").read_bytes()))


def publish_checkpoint(spec: TrainSpec, directory: Path, state: SimState, side: dict[str, Any]) -> tuple[Path, str]:
    """checkpoints/step-N with the state and a servable adapter inside."""
    staged = _fresh(directory / f".staged-step-{state.step}")
    (staged / "adapter").mkdir()
    write_adapter(spec, staged / "adapter", state.step, side)
    (staged / "state.json").write_text(json.dumps(state.__dict__))
    final = directory / "checkpoints" / f"step-{state.step}"
    manifest = publish_folder(staged, final, {"step": state.step, "run_id": spec.run.run_id})
    return final, manifest.digest


def publish_artifact(
    spec: TrainSpec, directory: Path, step: int, side: dict[str, Any], weights: bytes | None = None
) -> Manifest:
    staged = _fresh(directory / ".staged-artifact")
    write_adapter(spec, staged, step, side)
    if weights is not None:
        (staged / ADAPTER_WEIGHTS).write_bytes(weights)
    return publish_folder(staged, directory / "artifact", {"run_id": spec.run.run_id})


def write_adapter(spec: TrainSpec, folder: Path, step: int, side: dict[str, Any]) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(spec.run.base.path).name,
        "r": _rank(spec),
        "lora_alpha": 2 * _rank(spec),
        "target_modules": sorted({name.rpartition(".")[2] for name in _modules(spec)}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, sort_keys=True))
    (folder / ADAPTER_WEIGHTS).write_bytes(adapter_weights(spec, step))
    (folder / SIM_MARKER).write_text(json.dumps(side, sort_keys=True))


def adapter_weights(spec: TrainSpec, step: int, *, value: float | None = None) -> bytes:
    """The weights after `step` steps; `value` overwrites one number of them, e.g. with NaN."""
    origin = f"{spec.run.recipe.seed}:{spec.run.start.digest if spec.run.start else ''}"
    tensors: dict[str, tuple[list[int], list[float]]] = {}
    rank = _rank(spec)
    for module, (outer, inner) in _modules(spec).items():
        name = f"base_model.model.{module}"
        draw = random.Random(f"{origin}:{module}")  # noqa: S311 - reproducible weights, not secrecy
        ours = [draw.gauss(0.0, 0.1) for _ in range(rank * inner)]
        # B grows with each step from zero, as in a real LoRA
        theirs = [step * draw.gauss(0.0, 0.01) for _ in range(outer * rank)]
        tensors[f"{name}.lora_A.weight"] = ([rank, inner], ours)
        tensors[f"{name}.lora_B.weight"] = ([outer, rank], theirs)
    if value is not None:
        next(iter(tensors.values()))[1][-1] = value
    return safetensors_bytes(tensors)


def safetensors_bytes(tensors: dict[str, tuple[list[int], list[float]]]) -> bytes:
    """A safetensors file of F32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (shape, values) in tensors.items():
        data = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _modules(spec: TrainSpec) -> dict[str, tuple[int, ...]]:
    """Two modules of the base with the shapes of their matrices: of the attention, or whichever come first."""
    shapes = read_tensor_shapes(Path(spec.run.base.path))
    known = sorted(adaptable_modules(shapes), key=lambda name: (name.rpartition(".")[2] not in _MODULES, name))
    return {name: shapes[f"{name}.weight"] for name in known[: len(_MODULES)]}


def _rank(spec: TrainSpec) -> int:
    return min(_RANK, spec.run.recipe.lora_rank)


def _fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
