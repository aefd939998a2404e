"""The `watch.quality` section of a profile: how live answers are compared with those before the flip."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.core.section import Section

SignalKind = Literal["verifiers", "finished", "feedback", "errors", "latency"]


class QualityWatch(Section):
    """Compare the answers of a fresh deployment with those of the version before it; see docs/watch.md."""

    enabled: bool = True
    """Whether live answers are compared; if not, the watch only asks whether targets serve the new version."""
    signals: tuple[SignalKind, ...] = ("verifiers", "finished", "feedback", "errors", "latency")
    """What is compared: verifier scores, answers that ended by themselves, ratings, failed requests, slow answers."""
    min_answers: int = Field(default=50, ge=10, le=1_000_000)
    """Fewest answers of the version before that a signal is compared with; with fewer, it is not compared."""
    answers: int = Field(default=500, ge=1, le=2000)
    """Answers of the new version after which the watch may end."""
    min_s: float = Field(default=3600.0, ge=0.0, le=7 * 24 * 3600.0)
    """Shortest time of comparing, however many answers there are."""
    max_s: float = Field(default=24 * 3600.0, gt=0.0, le=7 * 24 * 3600.0)
    """Longest time of comparing: with fewer answers by then, the watch ends and says how few there were."""
    window_answers: int = Field(default=1000, ge=10, le=2000)
    """Most answers of the version before that are compared with, the newest ones."""
    window_days: float = Field(default=7.0, gt=0.0, le=30.0)
    """How old these may be at the flip."""
    max_drop: float = Field(default=0.02, ge=0.0, lt=1.0)
    """How far a mean (from 0 to 1) may fall; only a drop that is surely larger rolls back."""
    max_slowdown: float = Field(default=3.0, ge=1.0, le=1000.0)
    """How many times as long the median answer may take; only what is surely slower rolls back."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    """How sure a rollback must be, over all signals and all looks of one watch together."""

    @model_validator(mode="after")
    def _time_enough(self) -> QualityWatch:
        if self.max_s < self.min_s:
            raise ValueError("watch.quality.max_s: must not be shorter than watch.quality.min_s")
        if self.window_answers < self.min_answers:
            raise ValueError("watch.quality.window_answers: must not be less than watch.quality.min_answers")
        return self
