"""The `evaluation` and `gate` sections of a profile: what is measured after training, and what it must show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tunesmith.core.errors import did_you_mean
from tunesmith.core.section import Section, Share

COMMAND_METRIC = "command:"
"""What the names of the metrics of `evaluation.command` begin with."""


class EvaluationSettings(Section):
    metrics: tuple[str, ...] = ("heldout_loss",)
    """What is measured on the held-out pool, e.g. heldout_loss, verifier:length; see docs/evaluation.md."""
    max_cases: int = Field(default=1000, ge=1, le=100_000)
    """Most cases of the held-out pool that a run is judged on; over it, they are taken evenly over their age."""
    max_new_tokens: int = Field(default=64, ge=1, le=4096)
    """Longest answer generated for the metrics that need one."""
    temperature: float = Field(default=0.7, gt=0.0, le=5.0)
    """Temperature of the sampled metrics."""
    batch_size: int = Field(default=32, ge=1, le=4096)
    """Cases scored at once."""
    command: tuple[str, ...] = ()
    """A program of yours that scores answers, e.g. [python, scripts/score.py]; a list, run in the workspace."""
    command_metrics: dict[str, Literal["higher", "lower"]] = Field(default_factory=dict)
    """What that program measures, and which way each is better; NAME is the metric command:NAME."""
    command_timeout_s: float = Field(default=300.0, gt=0.0, le=24 * 3600.0)
    """Seconds that program may take for the cases of one side; keep it below worker.phase_deadlines_s.generate."""

    @model_validator(mode="after")
    def _command_has_metrics(self) -> EvaluationSettings:
        if bool(self.command) != bool(self.command_metrics):
            key = "command_metrics" if self.command else "command"
            raise ValueError(f"evaluation.{key}: a program that scores needs both command and command_metrics")
        if any(not part or "\0" in part for part in self.command):
            raise ValueError("evaluation.command: an element is empty or holds a NUL")
        for metric in self.metrics:
            name = metric.removeprefix(COMMAND_METRIC)
            if metric.startswith(COMMAND_METRIC) and name not in self.command_metrics:
                close = did_you_mean(name, self.command_metrics)
                raise ValueError(f"evaluation.metrics: {metric} is not among evaluation.command_metrics{close}")
        return self


class GateSettings(Section):
    aliases: ClassVar[Mapping[str, str]] = {"min_n": "min_cases"}

    primary: str = "heldout_loss"
    """The metric that must get better."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    """Confidence of the paired bootstrap."""
    min_gain: float = Field(default=0.01, ge=0.0, le=1_000_000.0)
    """Least gain of the primary metric that matters, in its own unit: nats of loss, share of right answers."""
    min_cases: int = Field(default=50, ge=2)
    """Minimum number of held-out cases; with fewer, nothing is promoted."""
    min_cases_of: dict[str, Annotated[int, Field(ge=2)]] = Field(default_factory=dict)
    """Another minimum for single metrics, e.g. for a verifier that applies to few cases."""
    max_drop: Share = 0.05
    """No other listed metric may fall by more than this."""
    floors: dict[str, float] = Field(default_factory=dict)
    """Absolute floors by metric, e.g. exact_match_greedy: 0.8."""
    on_tie: Literal["reject", "hold"] = "reject"
    """What to do when no difference can be measured, when it is too small to matter, or when a drop may be chance."""
    max_age_s: float = Field(default=24 * 3600.0, gt=0.0)
    """Older evidence is stale and is measured again."""
    hold_expires_s: float = Field(default=7 * 24 * 3600.0, gt=0.0)
    """A held run that nobody decides on is rejected after this long."""
