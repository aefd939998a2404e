"""An experience: one captured interaction, immutable, with its reservation beside it."""

from __future__ import annotations

from enum import StrEnum

from tunesmith.domain.transitions import Transitions

REJECTIONS_BEFORE_REVIEW = 2  # so that one poisoned batch cannot be rejected for ever


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
