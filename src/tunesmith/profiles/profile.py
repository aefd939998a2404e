"""A profile: the named description of one thing we tune. Unknown keys are refused; every field says what it is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tunesmith.core.errors import did_you_mean
from tunesmith.core.ids import is_name
from tunesmith.core.section import (
    Section,
    Share,
)
from tunesmith.profiles.sections.campaign import CampaignPolicy
from tunesmith.profiles.sections.curriculum import CurriculumPolicy
from tunesmith.profiles.sections.evaluation import EvaluationSettings, GateSettings
from tunesmith.profiles.sections.experience import ExperiencePolicy
from tunesmith.profiles.sections.screens import ScreenChoice, ScreenLimits
from tunesmith.profiles.sections.shadow import ShadowSettings
from tunesmith.profiles.sections.watch import QualityWatch
from tunesmith.verifiers.metric_names import verifiers_among

_MODULE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")


class Role(StrEnum):
    """What the tuned model does; each role names the model families it may use (`FAMILIES`)."""

    ASSISTANT = "assistant"
    EXTRACTOR = "extractor"
    CLASSIFIER = "classifier"
    REWRITER = "rewriter"
    CODER = "coder"


_GENERAL = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "smollm3", "olmo2"}
)
FAMILIES: dict[Role, frozenset[str]] = {
    Role.ASSISTANT: _GENERAL,
    Role.EXTRACTOR: _GENERAL,
    Role.CLASSIFIER: _GENERAL,
    Role.REWRITER: _GENERAL,
    Role.CODER: frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "starcoder2"}),
}
"""Exact `model_type` values of the base model's config.json, never substrings."""


class HardwareTier(StrEnum):
    CPU = "cpu"
    SMALL_GPU = "small-gpu"  # up to 12 GB
    CONSUMER_GPU = "consumer-gpu"  # up to 32 GB
    DATACENTER_GPU = "datacenter-gpu"  # more


class Base(Section):
    path: str
    """Folder of the base model in Hugging Face format, relative to the workspace."""
    revision: str | None = None
    """Which revision the folder holds; recorded in the spec, compared with nothing."""
    family: str
    """The model_type of its config.json, e.g. llama, qwen3."""
    context: int | None = Field(default=None, ge=16)
    """Longest sequence to use; may be smaller than the model's own, never larger."""
    trust_remote_code: Literal[False] = False
    """Always false: tunesmith never executes code that comes with a model."""


class Hardware(Section):
    tier: HardwareTier | None = None
    """What the run needs; unset takes the trainer's default tier."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes on this machine that train together, each on its share of every step; with GPUs, one per GPU."""
    memory_gb: float | None = Field(default=None, gt=0.0, le=1_000_000.0)
    """Most memory a run may use on its device, in GB of 2^30 bytes; unset: what is free there."""


class Method(StrEnum):
    AUTO = "auto"  # orpo where pairs exist, else sft
    SFT = "sft"
    DPO = "dpo"
    ORPO = "orpo"
    KTO = "kto"


class Recipe(Section):
    aliases: ClassVar[Mapping[str, str]] = {"clip": "max_grad_norm"}

    method: Method = Method.AUTO
    """sft, dpo, orpo, kto, or auto."""
    lr: float | None = Field(default=None, gt=0.0, le=1.0)
    """Peak learning rate; unset takes the method's default (sft 2e-4, orpo 3e-4, dpo and kto 5e-5; full: a tenth)."""
    epochs: float = Field(default=3.0, gt=0.0, le=1000.0)
    """Passes over the training split."""
    max_steps: int | None = Field(default=None, ge=1)
    """Upper limit of optimizer steps, whatever the epochs say."""
    batch_tokens: int = Field(default=8192, ge=16)
    """Tokens per optimizer step."""
    micro_batch_tokens: int | None = Field(default=None, ge=16)
    """Most tokens per forward pass; unset: what fits the device (`tunesmith plan`), on a CPU 4096."""
    activation_checkpointing: Literal["auto", "none", "all"] = "auto"
    """Compute layers again in the backward pass instead of keeping them: auto as few as the memory needs."""
    max_length: int = Field(default=2048, ge=16)
    """Longest example in tokens; longer ones are dropped and counted, never cut."""
    beta: float = Field(default=0.1, gt=0.0, le=100.0)
    """dpo, kto: how strongly the reference model holds back; orpo: weight of the odds ratio."""
    orpo_nll: Literal["conversation", "answer"] = "conversation"
    """orpo: learn every token of the better conversation, as the method was published, or only its answer."""
    desirable_weight: float = Field(default=1.0, ge=0.0, le=1000.0)
    """kto: weight of good answers."""
    undesirable_weight: float = Field(default=1.0, ge=0.0, le=1000.0)
    """kto: weight of bad answers; raise it where bad ones are rare."""
    tuning: Literal["lora", "full"] = "lora"
    """lora: an adapter on the base; full: every weight of a small model, saved as a model of its own."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: hold the base in 4 bits while its adapter is trained (QLoRA); judged and served on the full base."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank of the adapter."""
    lora_alpha: float = Field(default=32.0, gt=0.0, le=100_000.0)
    """Scale of the adapter."""
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout in front of the adapter; more than 0 is computed on the slow path."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Which modules get an adapter."""
    rslora: bool = False
    """Scale the adapter by alpha / sqrt(rank), so that high ranks learn as fast as low ones."""
    dora: bool = False
    """Train the size of each weight apart from its direction (DoRA); only where every target serves it."""
    train_embeddings: bool | Literal["auto"] = "auto"
    """true: train input and output embeddings; auto: the output's, if answers hold symbols the base never writes."""
    # Under auto, input embeddings that are not tied to the output's stay as they are: what the answers need is that the
    # symbol gets written, and the base has read it before. A token new to the tokenizer was never read: set true.
    warmup: Share = 0.1
    """Share of the steps in which the learning rate rises."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay of the adapter's weights."""
    max_grad_norm: float = Field(default=1.0, gt=0.0, le=1_000_000.0)
    """Maximum gradient norm; larger gradients are clipped to it."""
    packing: bool = True
    """Pack several examples into one sequence where the trainer can keep them apart."""
    fast_path: bool = True
    """native, on CUDA: compute with layers of our own where they are known to give the numbers of transformers'."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Order of examples, dropout, initial adapter."""

    @field_validator("target_modules")
    @classmethod
    def _plain_modules(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(value, tuple) and not value:
            raise ValueError("name at least one module, or write all-linear")
        if isinstance(value, tuple) and not all(_MODULE.match(part) for part in value):
            raise ValueError("a module's name holds only letters, digits, '_' and '.'")
        return value

    @model_validator(mode="after")
    def _quantized_base_is_frozen(self) -> Recipe:
        if self.quantize != "none" and self.tuning == "full":
            raise ValueError(
                f"recipe.quantize: {self.quantize} is for a base that stays as it is, and recipe.tuning: full trains "
                "every weight of it; set recipe.quantize: none, or recipe.tuning: lora"
            )
        return self

    @property
    def peak_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        return DEFAULT_LR[self.method] * (0.1 if self.tuning == "full" else 1.0)


DEFAULT_LR = {Method.AUTO: 2e-4, Method.SFT: 2e-4, Method.ORPO: 3e-4, Method.DPO: 5e-5, Method.KTO: 5e-5}


class DataSettings(Section):
    heldout_share: float = Field(default=0.1, gt=0.0, lt=0.9)
    """Share of prompts, by hash, that are never trained on in any round."""
    validation_share: float = Field(default=0.05, ge=0.0, lt=0.9)
    """Share of prompts, by hash, for validation inside training."""
    max_bad_share: Share = 0.1
    """Refuse a file with more than this share of bad lines."""
    heldout_cap: int = Field(default=1000, ge=10, le=100_000)
    """Most held-out cases that one dataset brings to the profile's pool."""
    screens: ScreenChoice = "default"
    """Screens that check every row before it may be trained; suspect rows are quarantined, see docs/screens.md."""
    detectors: tuple[str, ...] = ()
    """Installed detectors that search every text for personal data, e.g. presidio; see docs/screens.md."""
    limits: ScreenLimits = ScreenLimits()
    """How much of a dataset may come from one file or one template."""


class Validation(Section):
    every_steps: int = Field(default=20, ge=1)
    """Validate after this many optimizer steps, and at the end."""
    max_cases: int = Field(default=500, ge=1, le=500)
    """Fixed cases, chosen once."""
    best_metric: str = "validation_loss"
    """Which metric decides the best checkpoint."""
    best_direction: Literal["lower", "higher"] = "lower"
    """Which way is better; declared, never guessed from the name."""


class Checkpoints(Section):
    """When training saves what it can resume from: whichever of the three is due; also at validation's best, on TERM,
    on pause and at the end."""

    every_steps: int | None = Field(default=50, ge=1)
    """Write a checkpoint after this many optimizer steps; null: by minutes or epochs only."""
    every_minutes: float | None = Field(default=None, gt=0.0, le=7 * 24 * 60.0)
    """Write a checkpoint when the last one is this old; the clock decides only when to save, never what is learnt."""
    every_epochs: int | None = Field(default=None, ge=1)
    """Write a checkpoint after every so many passes over the data, counted from the first."""
    keep: int = Field(default=2, ge=1)
    """How many numbered ones stay beside best and last."""

    @model_validator(mode="after")
    def _at_least_one(self) -> Checkpoints:
        if self.every_steps is None and self.every_minutes is None and self.every_epochs is None:
            raise ValueError("set every_steps, every_minutes or every_epochs: a run that never saves cannot resume")
        return self


class Budgets(Section):
    wall_s: float = Field(default=240 * 60.0, gt=0.0)
    """Seconds one run may train, over all its attempts."""
    tokens: int = Field(default=2_000_000, ge=1)
    """Tokens one run may train on."""


class Answers(Section):
    max_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """Longest answer of `tunesmith serve` to a request that names no limit; serve.max_tokens is the most ever."""
    # A base that has not learnt yet rarely ends an answer by itself: without this it writes on for minutes.


class Deploy(Section):
    when: Literal["promoted", "approved", "never"] = "promoted"
    """promoted: at once; approved: a promoted adapter waits for a person; never: the run completes without."""


class Watch(Section):
    for_s: float = Field(default=60.0, ge=0.0, le=7 * 24 * 3600.0)
    """How long a fresh deployment is watched before it counts as deployed; 0: not at all, answers included."""
    interval_s: float = Field(default=5.0, gt=0.0)
    """Time between two looks at the targets."""
    max_failures: int = Field(default=3, ge=1)
    """Looks in a row that may find a target unhealthy before it is rolled back."""
    quality: QualityWatch = QualityWatch()
    """How live answers are compared with those before the flip, and what drop rolls back."""


class TargetSettings(Section):
    name: str = "directory"
    """How the target is called in listings; unique in the profile."""
    kind: str = "directory"
    """Which kind of target."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What this kind needs, e.g. path for a directory, and `for: vllm` if vLLM reads it."""
    parity_tolerance: float | None = Field(default=None, gt=0.0, le=10.0)
    """How far the log-probability of a token may be from the trainer's stack; unset: what the kind is known to need."""

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError("use lower-case letters, digits, '.', '_' and '-' only")
        return value


class TrainerSettings(Section):
    kind: str = "native"
    """Which trainer: native, trl, unsloth, command, dry-run, sim."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What this trainer needs beyond the recipe."""


class Profile(Section):
    name: str
    """Unique in the workspace; the file is profiles/NAME.yaml."""
    description: str = ""
    """One line for people."""
    role: Role
    """What the model does: assistant, extractor, classifier, rewriter, coder."""
    enabled: bool = True
    """A disabled profile takes no runs."""
    disabled_reason: str | None = None
    """Why it is disabled; required when it is."""
    base: Base
    """The model that is tuned."""
    hardware: Hardware = Hardware()
    """What a run needs to train on."""
    trainer: TrainerSettings = TrainerSettings()
    """Which program trains."""
    recipe: Recipe = Recipe()
    """Method and hyperparameters."""
    data: DataSettings = DataSettings()
    """How input files are split, and how many bad lines they may have."""
    experience: ExperiencePolicy = ExperiencePolicy()
    """What is captured of the model's use, and how it is judged."""
    curriculum: CurriculumPolicy = CurriculumPolicy()
    """Whether a teacher answers the worst again, and what that may cost."""
    campaign: CampaignPolicy = CampaignPolicy()
    """What opens rounds by itself while the profile has an active campaign, when it may, and what they may cost."""
    validation: Validation = Validation()
    """What is measured while training, and which checkpoint counts as best."""
    checkpoints: Checkpoints = Checkpoints()
    """How often training saves what it can resume from."""
    budgets: Budgets = Budgets()
    """What one run may spend."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """What is measured on the held-out pool after training."""
    gate: GateSettings = GateSettings()
    """What an adapter must show before it goes live."""
    shadow: ShadowSettings = ShadowSettings()
    """Whether a promoted candidate meets mirrored traffic before it goes live."""
    deploy: Deploy = Deploy()
    """When a promoted adapter goes live."""
    watch: Watch = Watch()
    """How a fresh deployment is watched."""
    targets: tuple[TargetSettings, ...] = (TargetSettings(),)
    """Where adapters are served: a list of name, kind and options."""
    answers: Answers = Answers()
    """How long an answer may be where the request does not say."""

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError("use lower-case letters, digits, '.', '_' and '-' only, at most 63 characters")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if not self.enabled and not (self.disabled_reason or "").strip():
            raise ValueError("disabled_reason: say why the profile is disabled")
        if self.base.family not in FAMILIES[self.role]:
            allowed = ", ".join(sorted(FAMILIES[self.role]))
            raise ValueError(
                f"base.family: {self.base.family!r} is not allowed for role {self.role}; allowed: {allowed}"
            )
        names = [target.name for target in self.targets]
        if not names:
            raise ValueError("targets: name at least one target, or what is deployed is served nowhere")
        if len(set(names)) != len(names):
            raise ValueError("targets: two targets have the same name")
        if self.gate.primary not in self.evaluation.metrics:
            close = did_you_mean(self.gate.primary, self.evaluation.metrics)
            raise ValueError(f"gate.primary: {self.gate.primary!r} is not among evaluation.metrics{close}")
        for name in verifiers_among(self.evaluation.metrics):
            if name not in self.experience.wanted:
                close = did_you_mean(name, self.experience.wanted)
                raise ValueError(
                    f"evaluation.metrics: the metric verifier:{name} needs the verifier's settings; "
                    f"name {name} under experience.verifiers{close}"
                )
        for key, named in (("floors", self.gate.floors), ("min_cases_of", self.gate.min_cases_of)):
            for metric in sorted(set(named) - set(self.evaluation.metrics)):
                raise ValueError(f"gate.{key}.{metric}: not among evaluation.metrics, so it would never be measured")
        if self.data.heldout_share + self.data.validation_share >= 1.0:
            raise ValueError("data.heldout_share: with data.validation_share it leaves nothing to train on")
        return self
