"""Words of what is learnt from experience: reviews, teachers' answers, money, the parts of a dataset."""

from __future__ import annotations

from enum import StrEnum


class ReviewDecision(StrEnum):
    """What a person says about a suspect; the last word counts."""

    ACCEPT = "accept"  # its suspicions are overruled, and its class is decided without them
    REJECT = "reject"  # it stays out for good


class CorrectionState(StrEnum):
    """What became of a teacher's attempt at one experience."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # there was an answer, and it was not good enough
    FAILED = "failed"  # there was no answer


class SpendState(StrEnum):
    RESERVED = "reserved"  # before the call, with the most it may cost
    SETTLED = "settled"  # after it, with what it did cost


class MemberRole(StrEnum):
    """Why an experience is in a dataset."""

    GOLD = "gold"
    CORRECTED = "corrected"  # with the answer it should have had
    REPLAY = "replay"  # learnt before, so that it is not forgotten
