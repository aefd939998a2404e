"""Mirrored answers of a candidate that is not live yet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ShadowOutcome(StrEnum):
    """What became of one mirrored request."""

    ANSWERED = "answered"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class Observed:
    """One mirrored request: what became of it, and whether a verifier said something against either answer."""

    outcome: ShadowOutcome
    is_flagged: bool
    live_is_flagged: bool
