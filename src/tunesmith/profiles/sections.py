"""The `experience` section of a profile: what is captured, which verifiers look at it, where the classes begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tunesmith.core.section import Section, Share
from tunesmith.experience.rules.classes import Thresholds
from tunesmith.experience.rules.mix import Mix
from tunesmith.verifiers.verifiers import settings_of


class CapturePolicy(Section):
    enabled: bool = True
    """Whether `client.capture` keeps anything; what is added by hand or imported is always kept."""
    share: Share = 1.0
    """Share of interactions that `client.capture` keeps, by the hash of their key: one is always kept, or never."""
    max_chars: int = Field(default=200_000, ge=100, le=10_000_000)
    """Longest interaction in characters, all messages together; longer ones are refused."""
    finished_only: bool = True
    """Whether an answer that was cut (limit, stop text, client gone) is kept only for its correction, never as gold."""
    consent: Literal["assumed", "required"] = "assumed"
    """assumed: `tunesmith serve` keeps an answer unless the request says no; required: only if it says yes."""
    implicit_feedback: bool = True
    """Whether a next turn that reads like a complaint counts as a hint against the answer before it."""


class ExperiencePolicy(Section):
    capture: CapturePolicy = CapturePolicy()
    """What is kept of what the model does."""
    verifiers: dict[str, Any] = Field(default_factory=lambda: {"template_echo": {}, "length": {}})
    """Which verifiers look at each experience, by name, with their settings: {} takes defaults, null leaves one out."""
    classes: Thresholds = Thresholds()
    """Where gold and needs_improvement begin."""
    mix: Mix = Mix()
    """What a dataset assembled from experiences is made of."""

    @model_validator(mode="after")
    def _known_verifiers(self) -> ExperiencePolicy:
        for name, said in self.verifiers.items():
            key = f"experience.verifiers.{name}"
            if said is not None and not isinstance(said, Mapping):
                raise ValueError(
                    f"{key}: settings are a mapping; write {{}} to take the defaults, or null to leave it out"
                )
            if said is None:
                continue
            try:
                settings_of(name, said)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        return self

    @property
    def wanted(self) -> dict[str, dict[str, Any]]:
        """The verifiers to ask; one that is set to null is left out, however it came in."""
        return {name: dict(said) for name, said in self.verifiers.items() if said is not None}
