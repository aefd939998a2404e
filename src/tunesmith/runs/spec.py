"""The run spec: everything that affects the weights and the judgement, resolved, with fingerprints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tunesmith.core.section import Section
from tunesmith.profiles.profile import (
    Budgets,
    Checkpoints,
    Deploy,
    Method,
    Recipe,
    TargetSettings,
    Validation,
    Watch,
)
from tunesmith.profiles.rules.lock import ArchitectureLock
from tunesmith.profiles.sections.evaluation import EvaluationSettings, GateSettings
from tunesmith.profiles.sections.shadow import ShadowSettings

if TYPE_CHECKING:  # every program reads its spec with this module: what only submitting needs is not imported for it
    from tunesmith.profiles.checks import CheckedProfile


class BaseModelRef(Section):
    path: str
    """Folder of the base model: in the store relative to the workspace where it lies in it, for programs absolute."""
    revision: str | None
    digest: str
    """sha256 over the content of the model's files."""
    lock: ArchitectureLock
    context: int


class AdapterRef(Section):
    """Adapter weights by place and content."""

    id: str
    path: str
    digest: str


class DatasetRef(Section):
    id: str
    path: str
    """Folder with train.parquet, validation.parquet, heldout.parquet and manifest.json; absolute for programs."""
    fingerprint: str
    num_train: int
    num_validation: int


class Fingerprints(Section):
    config: str
    """sha256 of the resolved profile."""
    code: str
    """sha256 over package version, source and the library versions that affect weights."""


class RunSpec(Section):
    """What a run is; stored with it, never changed."""

    v: Literal[1] = 1
    run_id: str
    profile: str
    campaign_id: str | None = None
    trainer: str
    trainer_options: dict[str, Any]
    method: Method
    hardware_tier: str
    num_processes: int = 1
    """Processes that make each training step together."""
    memory_gb: float | None = None
    """Most memory the run may use on its device; None: what is free there."""
    base: BaseModelRef
    start: AdapterRef | None
    """None starts from the base."""
    deploys: AdapterRef | None = None
    """A version that is there already: nothing is trained, it is judged and deployed. None: the run makes its own."""
    dataset: DatasetRef
    recipe: Recipe
    budgets: Budgets
    validation: Validation
    checkpoints: Checkpoints
    evaluation: EvaluationSettings
    verifiers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the verifiers that `evaluation.metrics` names."""
    command_sha256: dict[str, str] = Field(default_factory=dict)
    """sha256 of each file that `evaluation.command` names, by its element."""
    gate: GateSettings
    shadow: ShadowSettings = ShadowSettings()
    deploy: Deploy
    watch: Watch
    targets: tuple[TargetSettings, ...]
    expected_artifact: Literal["adapter", "model", "none"]
    dry_run: bool = False
    fingerprints: Fingerprints
    origins: dict[str, str] = Field(default_factory=dict)
    """Where each key that is not a schema default came from."""
    metadata: dict[str, str] = Field(default_factory=dict)


class AttemptRef(Section):
    """Which execution this is; a result that carries another token is not ours."""

    task_id: str
    attempt_id: str
    number: int
    token: str
    lease_s: float


class ResumeSource(Section):
    path: str
    """Absolute folder of a published checkpoint."""
    digest: str
    step: int


class TrainSpec(Section):
    """spec.json of a trainer."""

    v: Literal[1] = 1
    kind: Literal["train"] = "train"
    attempt: AttemptRef
    run: RunSpec
    resume: ResumeSource | None = None
    micro_batch_divisor: int = Field(default=1, ge=1)
    """2 after running out of memory."""
    spent_wall_s: float = 0.0
    """Training time of earlier attempts of this run; counts against the budget."""
    cache_dir: str | None = None
    """Absolute folder for what can be computed again, shared by all runs of a workspace; None keeps nothing."""
    memory_corrections: dict[str, float] = Field(default_factory=dict)
    """By shape key, what earlier runs took as a multiple of their forecast."""


class CasesRef(Section):
    path: str
    """JSONL, one case per line: {"id", "messages"}; the last message is the reference answer."""
    digest: str
    num: int
    answers: Literal["last", "trained"] = "last"
    """Which answers of a case are scored: the last one, or, by their weights, all that training would learn."""


class Subject(Section):
    """One side of a comparison: the base with an adapter, or the bare base (adapter None)."""

    label: Literal["candidate", "baseline"]
    adapter: AdapterRef | None


class ScoringCommand(Section):
    """A program of the user's that scores answers."""

    argv: tuple[str, ...]
    """Absolute paths where it names files; `python` is the running interpreter."""
    root: str
    """The workspace, in which it is started."""
    sha256: dict[str, str]
    """Of each file that it names, by the element that names it."""


class EvaluateSpec(Section):
    """spec.json of an evaluator."""

    v: Literal[1] = 1
    kind: Literal["evaluate"] = "evaluate"
    attempt: AttemptRef
    run_id: str
    base: BaseModelRef
    subjects: tuple[Subject, ...]
    cases: CasesRef
    evaluation: EvaluationSettings
    verifiers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the verifiers that `evaluation.metrics` names."""
    command: ScoringCommand | None = None
    """The program of `evaluation.command`; None where no metric needs it."""
    seed: int


def base_of(checked: CheckedProfile) -> BaseModelRef:
    """The profile's base as a program is told about it, with the digest of what is there now."""
    return BaseModelRef(
        path=str(checked.base_folder),
        revision=checked.profile.base.revision,
        digest=checked.base_digest,
        lock=checked.architecture,
        context=checked.context,
    )


MAX_TEXT = 200_001
"""Characters of an answer that are handed on: one more than a correction may have, so that it is seen."""


class TeachSpec(Section):
    """spec.json of the program that answers for a local teacher; its answers are lines of answers.jsonl (`Taught`)."""

    v: Literal[1] = 1
    kind: Literal["teach"] = "teach"
    attempt: AttemptRef
    model_path: str
    """Absolute folder of the teacher."""
    prompts_path: str
    """JSONL, one prompt per line: {"id", "messages"}; removed by the program as soon as it has read it."""
    num_prompts: int
    context: int
    """Tokens of prompt and answer together that the model can take."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    timeout_s: float
    """Seconds that one answer may take."""
    seed: int


class Taught(BaseModel):
    """A line of answers.jsonl: an answer and how it ended, or an error; never neither."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    text: str | None = Field(default=None, max_length=MAX_TEXT)
    finish: Literal["stop", "length"] | None = None
    num_in: int = Field(default=0, ge=0)
    error: str | None = Field(default=None, min_length=1, max_length=2000)

    @model_validator(mode="after")
    def _one_of_two(self) -> Taught:
        if (self.text is None) != (self.finish is None) or (self.text is None) == (self.error is None):
            raise ValueError("must hold an answer with its end, or an error")
        return self
