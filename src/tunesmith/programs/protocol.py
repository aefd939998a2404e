"""The program protocol, version 1: file names, limits, exit codes, the events of a program, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tunesmith.profiles.settings import Phase
from tunesmith.programs.shim import KEEPALIVE_EXIT, NO_SPACE_EXIT
from tunesmith.runs.rules.task import ErrorClass

SPEC = "spec.json"
EVENTS = "events.jsonl"
STATUS = "status.json"
CONTROL = "control.jsonl"
KEEPALIVE = "keepalive"
RESULT = "result.json"
STDOUT = "stdout.json"
STDERR = "stderr.log"
CHECKPOINTS = "checkpoints"
ARTIFACT = "artifact"
ANSWERS = "answers.jsonl"
REFERENCES = "references.json"

EXIT_OK = 0  # succeeded or stopped
EXIT_FAILED = 1
EXIT_BAD_CALL = 2  # no spec to work from, so no result either
EXIT_NO_SPACE = NO_SPACE_EXIT  # the disk had no room for the result
EXIT_NO_RESULT = 74  # the result could not be written
EXIT_INTERRUPTED = 75
EXIT_KEEPALIVE_LOST = KEEPALIVE_EXIT

MAX_LINE = 1 << 20
MAX_RESULT = 1 << 20
MAX_STDOUT = 1 << 20
MAX_STDERR = 256 << 20
MAX_EVENTS = 1 << 30
MAX_SPEC = 8 << 20
CAPS = {STDOUT: MAX_STDOUT, STDERR: MAX_STDERR, EVENTS: MAX_EVENTS}
"""By file: a program that writes more is killed at once, and the file is cut. Output and error come first."""
MAX_COUNT = 2**53 - 1  # larger counts would lose digits in JSON readers and columns

KEEPALIVE_SHARE = 0.8
"""A program ends itself when its keepalive is this share of the lease old; the shim ends it a little later."""


class _Wire(BaseModel):
    """Read from another process: strict about what it knows, frozen. NaN is allowed: programs must report it."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class _Event(_Wire):
    v: Literal[1] = 1
    seq: int = Field(ge=1)
    at: float
    """Unix time, for people."""


class Started(_Event):
    type: Literal["started"] = "started"
    pid: int
    versions: dict[str, str] = Field(default_factory=dict)


class PhaseEvent(_Event):
    type: Literal["phase"] = "phase"
    phase: Phase
    detail: str = ""


class Progress(_Event):
    type: Literal["progress"] = "progress"
    done: int = Field(ge=0)
    total: int = Field(ge=0)
    unit: str = "step"


class Metrics(_Event):
    type: Literal["metrics"] = "metrics"
    step: int = Field(ge=0)
    values: dict[str, float]
    """Raw, unfiltered: loss, grad_norm, lr, tokens, tokens_per_s, memory_mb, update_ratio."""


class SampleOutput(_Wire):
    prompt: str
    expected: str
    answer: str


class ValidationEvent(_Event):
    type: Literal["validation"] = "validation"
    step: int = Field(ge=0)
    values: dict[str, float]
    is_best: bool
    samples: tuple[SampleOutput, ...] = ()
    adapter_norms: dict[str, float] = Field(default_factory=dict)


class CheckpointEvent(_Event):
    type: Literal["checkpoint"] = "checkpoint"
    step: int = Field(ge=0)
    path: str
    """Folder name below DIR/checkpoints; never a path that leaves it."""
    digest: str
    kinds: tuple[Literal["best", "last", "step"], ...]


class Ack(_Event):
    type: Literal["ack"] = "ack"
    request_id: str
    detail: str = ""


class Log(_Event):
    type: Literal["log"] = "log"
    level: Literal["debug", "info", "warning", "error"] = "info"
    message: str


class Finished(_Event):
    type: Literal["finished"] = "finished"
    status: str


Event = Annotated[
    Started | PhaseEvent | Progress | Metrics | ValidationEvent | CheckpointEvent | Ack | Log | Finished,
    Field(discriminator="type"),
]


class ResultStatus(StrEnum):
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"  # ended early on request with the best so far
    INTERRUPTED = "interrupted"  # checkpointed, to be resumed
    FAILED = "failed"


class Artifact(_Wire):
    """What the program made, below its output folder."""

    path: str
    digest: str


class CaseScore(_Wire):
    """One case under one subject: a value per metric, or an error, which is never a score."""

    case_id: str
    values: dict[str, float] = Field(default_factory=dict)
    not_applicable: tuple[str, ...] = ()
    """Metrics that have nothing to say about this case; they have no value then."""
    answers: dict[str, str] = Field(default_factory=dict)
    error: str | None = None


class Scores(_Wire):
    """What an evaluator measured: by subject label, one score per case, in the order of the cases."""

    v: Literal[1] = 1
    by_subject: dict[str, tuple[CaseScore, ...]]


class Result(_Wire):
    """result.json: validated against the spec field by field, every mismatch listed."""

    v: Literal[1] = 1
    kind: Literal["train", "evaluate", "teach"]
    attempt_id: str
    token: str
    status: ResultStatus
    error_class: ErrorClass | None = None
    error: str | None = None
    # what was really read and used, recomputed by the program from the bytes
    base_digest: str | None = None
    start_digest: str | None = None
    dataset_fingerprint: str | None = None
    cases_digest: str | None = None
    config_fingerprint: str | None = None
    code_fingerprint: str | None = None
    # what came out
    artifact: Artifact | None = None
    best_step: int | None = None
    num_steps: int = 0
    num_trained_tokens: int = 0
    num_trained_examples: int = 0
    num_dropped_examples: int = 0
    train_s: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
    scores: Artifact | None = None
    """Evaluators: the file that holds a `Scores`; too long for a result."""
    references: Artifact | None = None
    """Evaluators: the file that holds the candidate's `References`, without which nobody who can be asked serves it."""
    detail: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class LiveCheckFailure:
    """Why training must stop; the numbers are in the sentence."""

    rule: str
    reason: str
