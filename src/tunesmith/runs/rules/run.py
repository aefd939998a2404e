"""A run: the intention to produce one adapter version, and what its end means for data and campaign."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from tunesmith.core.states import Transitions
from tunesmith.profiles.rules.campaign import CounterEffect

PAUSED_ON_REQUEST = "paused on request"
"""The reason of a run that a person has paused."""


class RunState(StrEnum):
    QUEUED = "queued"
    TRAINING = "training"
    PAUSED = "paused"
    EVALUATING = "evaluating"
    SHADOWING = "shadowing"
    HELD = "held"
    DEPLOYING = "deploying"
    WATCHING = "watching"
    DEPLOYED = "deployed"
    COMPLETED = "completed"
    VALIDATED = "validated"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


R = RunState

RUN = Transitions(
    "run",
    {
        R.QUEUED: frozenset({R.TRAINING, R.EVALUATING, R.DEPLOYING, R.CANCELLED, R.SKIPPED}),
        R.TRAINING: frozenset({R.QUEUED, R.PAUSED, R.EVALUATING, R.VALIDATED, R.FAILED, R.CANCELLED}),
        R.PAUSED: frozenset({R.QUEUED, R.EVALUATING, R.CANCELLED}),
        R.EVALUATING: frozenset({R.DEPLOYING, R.SHADOWING, R.HELD, R.REJECTED, R.COMPLETED, R.FAILED, R.CANCELLED}),
        R.SHADOWING: frozenset({R.EVALUATING, R.REJECTED, R.CANCELLED}),
        R.HELD: frozenset({R.DEPLOYING, R.EVALUATING, R.REJECTED, R.CANCELLED}),
        R.DEPLOYING: frozenset({R.WATCHING, R.EVALUATING, R.HELD, R.REJECTED, R.ROLLED_BACK, R.CANCELLED}),
        R.WATCHING: frozenset({R.DEPLOYED, R.ROLLED_BACK}),
        R.DEPLOYED: frozenset({R.ROLLED_BACK}),
        R.COMPLETED: frozenset(),
        R.VALIDATED: frozenset(),
        R.REJECTED: frozenset(),
        R.ROLLED_BACK: frozenset(),
        R.FAILED: frozenset(),
        R.CANCELLED: frozenset(),
        R.SKIPPED: frozenset(),
    },
    settled=frozenset({R.DEPLOYED}),
)


class Priority(StrEnum):
    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """Lower goes first."""
        return {"high": 0, "normal": 1, "low": 2}[self.value]

    @classmethod
    def of_rank(cls, rank: int) -> Priority:
        return next(priority for priority in cls if priority.rank == rank)


class DataEffect(StrEnum):
    """What the end of a run does to the experiences its dataset reserved."""

    CONSUME = "consume"
    RELEASE = "release"
    RELEASE_AND_COUNT = "release_and_count"  # num_rejections + 1 on each; at 2 they go to review


@dataclass(frozen=True)
class EndEffect:
    data: DataEffect
    counters: CounterEffect


NO_EFFECT = EndEffect(DataEffect.RELEASE, CounterEffect.NONE)
"""Of a run that trained nothing."""


def effect_of_end(state: RunState) -> EndEffect:
    """How a run ends → what becomes of its data and of the campaign's counters."""
    match state:
        case R.DEPLOYED | R.COMPLETED:
            return EndEffect(DataEffect.CONSUME, CounterEffect.SUCCESS)
        case R.REJECTED | R.ROLLED_BACK:
            return EndEffect(DataEffect.RELEASE_AND_COUNT, CounterEffect.REJECTION)
        case R.FAILED:
            return EndEffect(DataEffect.RELEASE, CounterEffect.FAILURE)
        case R.VALIDATED | R.CANCELLED | R.SKIPPED:
            return NO_EFFECT
        case R.QUEUED | R.TRAINING | R.PAUSED | R.EVALUATING | R.SHADOWING | R.HELD | R.DEPLOYING | R.WATCHING:
            raise ValueError(f"a run that is {state} has not ended")
        case _:
            assert_never(state)
