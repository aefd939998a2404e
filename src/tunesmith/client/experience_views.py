"""What `client.experiences` and `client.feedback` return."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tunesmith.client.views import EventView
from tunesmith.curriculum.queries.corrections import StoredCorrection
from tunesmith.experience.queries.experiences import Experience
from tunesmith.experience.queries.feedback import StoredFeedback
from tunesmith.experience.queries.members import Member
from tunesmith.experience.rules.classes import Assessment
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.rules.feedback import Feedback
from tunesmith.verifiers.base import Finding, Interaction


@dataclass(frozen=True)
class ExperienceView:
    """An experience as listings show it."""

    id: str
    profile: str
    key: str
    state: str
    class_name: str
    reasons: tuple[str, ...]
    feedback: Feedback
    question: str
    answer: str
    source: str | None
    session: str | None
    served_by: str | None
    template: str | None
    task_type: str | None
    captured_at: datetime
    created_at: datetime
    key_label: str | None
    """The API key that `tunesmith serve` gave the answer to."""


@dataclass(frozen=True)
class ExperienceDetail:
    """Everything about one experience."""

    experience: ExperienceView
    messages: list[dict[str, Any]]
    reference: str | None
    findings: dict[str, Finding]
    suspicions: tuple[str, ...]
    dataset_id: str | None
    run_id: str | None
    adapter_id: str | None
    num_rejections: int
    in_review: bool
    feedback: tuple[StoredFeedback, ...]
    corrections: tuple[StoredCorrection, ...]
    """What teachers answered in its place, and what became of it."""
    events: tuple[EventView, ...]
    datasets: tuple[Member, ...]
    """Every dataset that was assembled with it, the oldest first; `dataset_id` is the one that has it now."""


@dataclass(frozen=True)
class StatsView:
    """The experiences of one profile in figures."""

    profile: str
    num: int
    classes: dict[str, int]
    states: dict[str, int]
    num_rated: int
    mean_feedback: float | None
    num_corrected: int
    """How many have a correction that a person gave and nobody has withdrawn."""


def view_of(experience: Experience, assessment: Assessment) -> ExperienceView:
    interaction = Interaction(experience.messages)
    is_forgotten = experience.state is ExperienceState.FORGOTTEN
    return ExperienceView(
        id=experience.id,
        profile=experience.profile,
        key=experience.natural_key,
        state=experience.state,
        class_name=experience.state.value if is_forgotten else assessment.class_name,
        reasons=assessment.reasons,
        feedback=Feedback() if is_forgotten else assessment.feedback,
        question=interaction.question,
        answer=interaction.answer,
        source=experience.source,
        session=experience.session,
        served_by=experience.served_by,
        template=experience.template,
        task_type=experience.task_type,
        captured_at=experience.captured_at or experience.created_at,
        created_at=experience.created_at,
        key_label=experience.key_label,
    )
