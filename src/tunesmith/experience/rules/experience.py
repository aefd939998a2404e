"""An experience: one captured interaction, immutable; its class, feedback and reservation stand beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from tunesmith.core.states import Transitions

REJECTIONS_BEFORE_REVIEW = 2  # so that one poisoned batch cannot be rejected for ever
REJECTED_RUNS = "rejected_runs"
"""Why something waits that no screen has stopped."""


class ExperienceState(StrEnum):
    COLLECTED = "collected"
    RESERVED = "reserved"
    CONSUMED = "consumed"
    FORGOTTEN = "forgotten"


E = ExperienceState

EXPERIENCE = Transitions(
    "experience",
    {
        E.COLLECTED: frozenset({E.RESERVED, E.FORGOTTEN}),
        E.RESERVED: frozenset({E.COLLECTED, E.CONSUMED, E.FORGOTTEN}),
        E.CONSUMED: frozenset({E.COLLECTED, E.FORGOTTEN}),
        E.FORGOTTEN: frozenset(),
    },
)


class ExperienceClass(StrEnum):
    """What an experience is worth as training data, as far as is known now; late feedback moves it."""

    GOLD = "gold"
    NEEDS_IMPROVEMENT = "needs_improvement"
    AMBIGUOUS = "ambiguous"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Context:
    """Where an interaction came from; none of it is needed."""

    source: str | None = None
    """Which application or file brought it."""
    session: str | None = None
    """The conversation it was part of, as the application calls it."""
    served_by: str | None = None
    """The adapter version that answered, such as support@v3."""
    template: str | None = None
    """The name of the prompt's template."""
    task_type: str | None = None
    """What kind of task it was, for mixing and filtering."""
    reference: str | None = None
    """The answer that was expected, where it is known."""
    captured_at: datetime | None = None
    """When it happened; unset: when it is stored."""


def next_turn_after(answer: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """What the person said right after this answer in a later conversation; None where that cannot be told.

    Some applications log the whole conversation each time, others only the last turn.
    """
    for place in range(len(messages) - 2, -1, -1):
        here, then = messages[place], messages[place + 1]
        if here["role"] == "assistant" and here.get("content") == answer and then["role"] == "user":
            return str(then.get("content") or "")
    said = [message for message in messages if message["role"] == "user"]
    answered = [message for message in messages if message["role"] == "assistant"]
    return str(said[0].get("content") or "") if len(said) == len(answered) == 1 else None


class ReviewDecision(StrEnum):
    """What a person says about a suspect; the last word counts."""

    ACCEPT = "accept"  # its suspicions are overruled, and its class is decided without them
    REJECT = "reject"  # it stays out for good


class CorrectionState(StrEnum):
    """What became of a teacher's attempt at one experience."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # there was an answer, and it was not good enough
    FAILED = "failed"  # there was no answer


def screens_of(suspicions: Iterable[str]) -> tuple[str, ...]:
    """The names of the screens that suspect something, each once."""
    return tuple(dict.fromkeys(suspicion.partition(":")[0] for suspicion in suspicions))
