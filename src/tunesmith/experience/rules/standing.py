"""Standing: whether who gave an answer had proved itself, so that silence about the answer may count as praise.

A version that is or was live has been judged, and people could complain about it. What never went live, or was taken
back, has not: of its answers only those are learnt that somebody spoke for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tunesmith.models.rules import AdapterState

NEVER_LIVE = "answered by a version that never went live, and nobody rated it"
TAKEN_BACK = "answered by a version that was rolled back or revoked, and nobody rated it"
BASE_BESIDE_LIVE = "answered by the bare base while a version was live, and nobody rated it"
_DOUBTS = {
    AdapterState.CANDIDATE: (NEVER_LIVE, "which never went live"),
    AdapterState.ROLLED_BACK: (TAKEN_BACK, "which was rolled back"),
    AdapterState.REVOKED: (TAKEN_BACK, "which was revoked"),
}


@dataclass(frozen=True)
class Doubt:
    kind: str
    """The same for all answers that are doubted for the same reason; they are counted by it."""
    reason: str


@dataclass(frozen=True)
class Standing:
    """What is known of the versions of a profile."""

    profile: str
    states: Mapping[str, AdapterState]
    """Of each version, by its name."""
    spans: Sequence[tuple[datetime, datetime | None]]
    """From when till when some version was live; None: it still is. Outside of them the bare base was."""

    def doubt(self, served_by: str | None, at: datetime) -> Doubt | None:
        """Why silence about an answer of that moment says nothing for it; None also where nobody knows who gave it."""
        if served_by == f"{self.profile}@base":
            is_beside = any(begin <= at and (end is None or at < end) for begin, end in self.spans)
            return Doubt(BASE_BESIDE_LIVE, "answered by the bare base while a version was live") if is_beside else None
        state = self.states.get(served_by) if served_by is not None else None
        if state not in _DOUBTS:
            return None
        kind, reason = _DOUBTS[state]
        return Doubt(kind, f"answered by {served_by}, {reason}")
