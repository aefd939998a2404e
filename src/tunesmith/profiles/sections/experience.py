"""The `experience` section of a profile: what is captured, which verifiers look at it, where the classes begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tunesmith.core.section import Section, Share
from tunesmith.verifiers.registry import settings_of


class Thresholds(Section):
    """Where one class ends and the next begins."""

    gold_entities: Share = 0.9
    """Gold keeps more than this share of the question's entities."""
    poor_entities: Share = 0.7
    """Below this share, an answer needs improvement."""
    gold_feedback: Share = 0.8
    """Gold has feedback above this, or none and no flags."""
    poor_feedback: Share = 0.3
    """Feedback below this needs improvement, with enough ratings."""
    min_poor_ratings: int = Field(default=3, ge=1)
    """How many voices (API keys, and raters without a key) it takes before poor feedback decides."""

    @model_validator(mode="after")
    def _in_order(self) -> Thresholds:
        if self.poor_entities > self.gold_entities:
            raise ValueError("experience.classes.poor_entities: must not be more than gold_entities")
        if self.poor_feedback > self.gold_feedback:
            raise ValueError("experience.classes.poor_feedback: must not be more than gold_feedback")
        return self


class Mix(Section):
    """The `experience.mix` section of a profile."""

    aliases: ClassVar[Mapping[str, str]] = {"min_beside": "min_eval_examples"}

    gold: Share = 0.5
    """Share of good answers, relative to the other two."""
    corrected: Share = 0.2
    """Share of answers that a person or a teacher corrected."""
    replay: Share = 0.3
    """Share of what was learnt before, so that it is not forgotten."""
    min_new: int = Field(default=50, ge=1, le=1_000_000)
    """Fewest examples to train on that were never learnt; with fewer, nothing is assembled."""
    max_examples: int = Field(default=200, ge=1, le=1_000_000)
    """Most examples to train on; held-out and validation ones come along beside them."""
    max_template_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Most of these that one template may have, where there are several."""
    max_source_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Most of these that one source (an application, a file) may have, where there are several."""
    min_eval_examples: int = Field(default=50, ge=0, le=100_000)
    """Minimum number of held-out and of validation examples to add, if there are that many."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Which of many are taken."""
    task_types: tuple[str, ...] = ()
    """Only experiences of these task types; empty: all."""
    unrated_base: bool = False
    """Whether answers that the bare base served are learnt though nobody has rated or corrected them."""

    @model_validator(mode="after")
    def _room_for_new(self) -> Mix:
        if self.gold + self.corrected == 0.0:
            raise ValueError("experience.mix.gold: with experience.mix.corrected it leaves no place for new examples")
        if self.new_places < self.min_new:
            raise ValueError(
                f"experience.mix.min_new: {self.min_new} is more than the {self.new_places} places for new examples "
                f"among {self.max_examples} (max_examples); lower it, or raise max_examples"
            )
        return self

    @property
    def replay_places(self) -> int:
        return round(self.max_examples * self.replay / (self.gold + self.corrected + self.replay))

    @property
    def new_places(self) -> int:
        return self.max_examples - self.replay_places

    @property
    def corrected_places(self) -> int:
        return round(self.new_places * self.corrected / (self.gold + self.corrected))


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
