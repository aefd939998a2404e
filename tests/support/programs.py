"""Builders for tests of programs: a small base, a published dataset, specs, and how to run one to its end."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.quick_processes import run_code
from tunesmith.core.files import sha256_file
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PreparedDataset, PrepareOptions
from tunesmith.profiles.architecture import read_architecture
from tunesmith.profiles.base_model import base_digest
from tunesmith.profiles.profile import (
    Budgets,
    Checkpoints,
    Deploy,
    EvaluationSettings,
    GateSettings,
    Method,
    Recipe,
    TargetSettings,
    Validation,
    Watch,
)
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.launch import RunningProgram, launch
from tunesmith.programs.process_identity import MARKER
from tunesmith.programs.shim import all_processes
from tunesmith.runs.spec import (
    AdapterRef,
    AttemptRef,
    BaseModelRef,
    CasesRef,
    DatasetRef,
    EvaluateSpec,
    Fingerprints,
    ResumeSource,
    RunSpec,
    Subject,
    TrainSpec,
)
from tunesmith.training.trainers.command import argv_of, environment_of
from tunesmith.training.trainers.registry import find_trainer
from tunesmith.training.trainers.sim.files import safetensors_bytes

_numbers = itertools.count(1)
REPOSITORY = Path(__file__).resolve().parents[2]
"""The workspace of command trainers: they are named as examples/NAME.py."""

BASE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}


def a_base(folder: Path) -> Path:
    """A folder that looks like a tiny base model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG))
    width = int(BASE_CONFIG["hidden_size"])  # type: ignore[call-overload]
    layer = "model.layers.0.self_attn"
    square = ([width, width], [0.1] * width * width)
    (folder / "model.safetensors").write_bytes(
        safetensors_bytes(
            {
                "embed.weight": ([2, 2], [0.1, 0.2, 0.3, 0.4]),
                f"{layer}.q_proj.weight": square,
                f"{layer}.v_proj.weight": square,
            }
        )
    )
    return folder


def a_real_base(folder: Path) -> Path:
    """A tiny untrained model with tokenizer and chat template, made by torch in a process of its own."""
    script = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from tunesmith.demo.base_model import byte_tokenizer

torch.manual_seed(1)
tokenizer = byte_tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
    bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""
    made = run_code(script, folder, with_torch=True)
    assert made.returncode == 0, made.stderr
    return folder


def a_dataset(folder: Path) -> PreparedDataset:
    """A real published dataset of small sums."""
    source = folder.with_suffix(".jsonl")
    lines = [{"prompt": f"{i} + {i}", "completion": str(i + i)} for i in range(60)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return prepare([source], folder, PrepareOptions(heldout_share=0.1, validation_share=0.1))


@dataclass
class World:
    """A place for programs: one base, one dataset, and a fresh folder for each attempt."""

    root: Path
    lease_s: float = 30.0
    needs_model: bool = False
    running: list[RunningProgram] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = (a_real_base if self.needs_model else a_base)(self.root / "base")
        self.dataset = a_dataset(self.root / "dataset")
        self.base_ref = BaseModelRef(
            path=str(self.base),
            revision=None,
            digest=base_digest(self.base),
            lock=read_architecture(self.base),
            context=64,
        )

    def run_spec(self, trainer: str = "sim", **changes: Any) -> RunSpec:
        options = changes.pop("options", {})
        code_fingerprint.cache_clear()  # the source may be edited while the tests run
        fields: dict[str, Any] = {
            "run_id": f"run-{next(_numbers)}",
            "profile": "support",
            "trainer": trainer,
            "trainer_options": options,
            "method": Method.SFT,
            "hardware_tier": "cpu",
            "base": self.base_ref,
            "start": None,
            "dataset": DatasetRef(
                id="ds-1",
                path=str(self.dataset.path),
                fingerprint=self.dataset.fingerprint,
                num_train=self.dataset.counts[Split.TRAIN],
                num_validation=self.dataset.counts[Split.VALIDATION],
            ),
            "recipe": Recipe(method=Method.SFT, lora_rank=2, max_length=64, batch_tokens=256),
            "budgets": Budgets(),
            "validation": Validation(every_steps=2),
            "checkpoints": Checkpoints(every_steps=3),
            "evaluation": EvaluationSettings(),
            "gate": GateSettings(),
            "deploy": Deploy(),
            "watch": Watch(),
            "targets": (TargetSettings(),),
            "expected_artifact": "none" if trainer == "dry-run" else "adapter",
            "fingerprints": Fingerprints(config="c" * 64, code=code_fingerprint()),
        }
        return RunSpec(**(fields | changes))

    def attempt(self, number: int = 1) -> AttemptRef:
        n = next(_numbers)
        return AttemptRef(
            task_id=f"task-{n}",
            attempt_id=f"att-{os.getpid()}x{n}",
            number=number,
            token=f"token-{n}",
            lease_s=self.lease_s,
        )

    def train_spec(
        self,
        trainer: str = "sim",
        *,
        number: int = 1,
        resume: ResumeSource | None = None,
        divisor: int = 1,
        **changes: Any,
    ) -> TrainSpec:
        run = self.run_spec(trainer, **changes)
        return TrainSpec(attempt=self.attempt(number), run=run, resume=resume, micro_batch_divisor=divisor)

    def evaluate_spec(self, subjects: tuple[Subject, ...], num_cases: int = 60) -> EvaluateSpec:
        cases = self.root / "cases.jsonl"
        lines = [json.dumps({"id": f"case-{i}", "messages": []}) + "\n" for i in range(num_cases)]
        cases.write_text("".join(lines))
        return EvaluateSpec(
            attempt=self.attempt(),
            run_id="run-1",
            base=self.base_ref,
            subjects=subjects,
            cases=CasesRef(path=str(cases), digest=sha256_file(cases), num=num_cases),
            evaluation=EvaluationSettings(),
            seed=1,
        )

    def folder(self, spec: TrainSpec | EvaluateSpec) -> Path:
        return self.root / "attempts" / spec.attempt.attempt_id

    def launch(self, spec: TrainSpec | EvaluateSpec, argv: tuple[str, ...] | None = None) -> RunningProgram:
        env = None
        if argv is None and isinstance(spec, TrainSpec):
            trainer, options = find_trainer(spec.run.trainer), spec.run.trainer_options
            argv, env = argv_of(trainer, options, REPOSITORY), environment_of(trainer, options, os.environ)
        program = launch(argv or EVALUATE, spec, self.folder(spec), env=env)
        self.running.append(program)
        return program

    def run(self, spec: TrainSpec | EvaluateSpec, argv: tuple[str, ...] | None = None) -> int:
        return finish(self.launch(spec, argv))

    def close(self) -> None:
        for program in self.running:
            program.kill_tree(0.0)


EVALUATE = ("python", "-m", "tunesmith.evaluation.evaluators.main")


def finish(program: RunningProgram, timeout_s: float = 30.0) -> int:
    """Wait for the end of a program; its exit code."""
    code = wait_until(program.poll, timeout_s)
    assert isinstance(code, int)
    return code


def wait_until(condition: Any, timeout_s: float = 30.0) -> Any:
    """The first value of `condition` that is not None or False."""
    deadline = time.monotonic() + timeout_s
    while (value := condition()) is None or value is False:
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return value


def adapter_ref(world: World, spec: TrainSpec, digest: str) -> AdapterRef:
    return AdapterRef(id="ad-1", path=str(world.folder(spec) / "artifact"), digest=digest)


def strays(attempt_id: str) -> list[int]:
    """Living processes that carry the attempt's marker."""
    wanted = f"{MARKER}={attempt_id}".encode()
    found = []
    for process in all_processes():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if process.state not in "ZX" and wanted in environ.split(b"\0"):
            found.append(process.pid)
    return found
