"""Builders for tests of the native trainer and the held-out evaluator: tiny real models, real datasets, real specs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.files import sha256_file
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PrepareOptions
from tunesmith.demo.base_model import byte_tokenizer, cached_base
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
from tunesmith.programs.event_log import EventReader
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.host import Program
from tunesmith.programs.protocol import CONTROL, EVENTS, CheckpointEvent, Event, Metrics, Result, Scores
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

_numbers = itertools.count(1)
Row = Mapping[str, Any]


def a_micro_base(folder: Path, *, tied: bool = True, nan_in: str | None = None, seed: int = 0) -> Path:
    """A random Llama of about ten thousand parameters with the byte tokenizer; `nan_in` names a weight to break."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=256,
                tie_word_embeddings=tied,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    if nan_in is not None:
        dict(model.named_parameters())[nan_in].data.flatten()[0] = float("nan")
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    ]


def small_rows(num: int = 60) -> list[Row]:
    """Easy rows of different lengths."""
    return rows_of(
        (f"say {number}" + "!" * (number % 7), "yes " * (1 + number % 3) + str(number)) for number in range(num)
    )


def pair_rows(num: int = 60) -> list[Row]:
    """Questions with a better and a worse answer."""
    return [
        {
            "prompt": f"say {number}" + "!" * (number % 7),
            "chosen": "yes " * (1 + number % 3) + str(number),
            "rejected": "no " * (1 + number % 2) + str(number + 1),
        }
        for number in range(num)
    ]


def labelled_rows(num: int = 60) -> list[Row]:
    """Answers that somebody called good or bad."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 2 else "rejected"], "label": bool(number % 2)}
        for number, row in enumerate(pair_rows(num))
    ]


def a_base_ref(folder: Path, context: int = 256) -> BaseModelRef:
    return BaseModelRef(
        path=str(folder), revision=None, digest=base_digest(folder), lock=read_architecture(folder), context=context
    )


def a_dataset(folder: Path, rows: Sequence[Row], **options: Any) -> DatasetRef:
    """The rows, prepared and published as `folder`."""
    source = folder.with_suffix(".jsonl")
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = prepare([source], folder, PrepareOptions(**options))
    return DatasetRef(
        id=f"ds-{next(_numbers)}",
        path=str(folder),
        fingerprint=made.fingerprint,
        num_train=made.counts[Split.TRAIN],
        num_validation=made.counts[Split.VALIDATION],
    )


def a_recipe(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "method": Method.SFT,
        "lr": 3e-3,
        "epochs": 2,
        "batch_tokens": 200,
        "micro_batch_tokens": 128,
        "max_length": 256,
        "lora_rank": 4,
    }
    return Recipe(**(fields | changes))


def a_train_spec(
    base: BaseModelRef,
    dataset: DatasetRef,
    *,
    recipe: Recipe | None = None,
    resume: ResumeSource | None = None,
    run_id: str = "run-1",
    spent_wall_s: float = 0.0,
    divisor: int = 1,
    **changes: Any,
) -> TrainSpec:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "profile": "dates",
        "trainer": "native",
        "trainer_options": {},
        "method": Method.SFT,
        "hardware_tier": "cpu",
        "base": base,
        "start": None,
        "dataset": dataset,
        "recipe": recipe or a_recipe(),
        "budgets": Budgets(),
        "validation": Validation(every_steps=4, max_cases=10),
        "checkpoints": Checkpoints(every_steps=3),
        "evaluation": EvaluationSettings(),
        "gate": GateSettings(),
        "deploy": Deploy(),
        "watch": Watch(),
        "targets": (TargetSettings(),),
        "expected_artifact": "adapter",
        "fingerprints": Fingerprints(config="c" * 64, code=code_fingerprint()),
    }
    return TrainSpec(
        attempt=an_attempt(),
        run=RunSpec(**(fields | changes)),
        resume=resume,
        spent_wall_s=spent_wall_s,
        micro_batch_divisor=divisor,
    )


def an_attempt(lease_s: float = 600.0) -> AttemptRef:
    number = next(_numbers)
    return AttemptRef(
        task_id=f"task-{number}", attempt_id=f"att-{number}", number=1, token=f"t{number}", lease_s=lease_s
    )


def an_evaluate_spec(
    folder: Path, base: BaseModelRef, rows: Sequence[Row], adapter: AdapterRef | None, **evaluation: Any
) -> EvaluateSpec:
    """Candidate (the adapter) against the bare base on these rows."""
    cases = folder / f"cases-{next(_numbers)}.jsonl"
    lines = [json.dumps({"id": f"case-{number}", **row}) + "\n" for number, row in enumerate(rows)]
    cases.write_text("".join(lines))
    return EvaluateSpec(
        attempt=an_attempt(),
        run_id="run-1",
        base=base,
        subjects=(Subject(label="candidate", adapter=adapter), Subject(label="baseline", adapter=None)),
        cases=CasesRef(path=str(cases), digest=sha256_file(cases), num=len(rows)),
        evaluation=EvaluationSettings(**evaluation),
        seed=1,
    )


def a_program(spec: TrainSpec | EvaluateSpec, folder: Path) -> Program:
    """The program's side of the protocol without a process around it: for tests that look inside."""
    folder.mkdir(parents=True)
    (folder / CONTROL).touch()
    return Program(spec, folder)


def events_of(folder: Path) -> list[Event]:
    return list(EventReader(folder / EVENTS).read())


def adapter_ref(folder: Path, result: Result) -> AdapterRef:
    """What a training made, as the next one's start or an evaluation's subject."""
    assert result.artifact is not None
    return AdapterRef(id="ad-1", path=str(folder / result.artifact.path), digest=result.artifact.digest)


def train_here(spec: TrainSpec, folder: Path) -> Result:
    """Train in this process: quick, and failures can be looked at."""
    from tunesmith.training.trainers.native.train import train

    return train(a_program(spec, folder))


def evaluate_here(spec: EvaluateSpec, folder: Path) -> tuple[Result, Scores]:
    from tunesmith.evaluation.evaluators.main import evaluate

    result = evaluate(a_program(spec, folder))
    return result, Scores.model_validate_json((folder / "scores.json").read_bytes())


def resume_from(folder: Path, step: int) -> ResumeSource:
    """The published checkpoint of that step, as the next attempt is told about it."""
    events = [event for event in events_of(folder) if isinstance(event, CheckpointEvent) and event.step == step]
    path = folder / "checkpoints" / events[-1].path
    return ResumeSource(path=str(path), digest=events[-1].digest, step=step)


def losses_of(folder: Path) -> dict[int, float]:
    return {event.step: event.values["loss"] for event in events_of(folder) if isinstance(event, Metrics)}


def weights_of(folder: Path) -> str:
    return sha256_file(folder / "artifact" / "adapter_model.safetensors")


def quick_base() -> Path:
    """The demo's quick base, built once per machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunesmith"
    return cached_base(cache, quick=True)
