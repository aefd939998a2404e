"""Which versions were live when: whether silence about an answer may count as praise. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tunesmith.models.rules import AdapterState

NEVER_LIVE = "answered by a version that never went live, and nobody rated it"
TAKEN_BACK = "answered by a version that was rolled back or revoked, and nobody rated it"
BASE_BESIDE_LIVE = "answered by the bare base while a version was live, and nobody rated it"
BASE_UNRATED = "the bare base gave it, and nobody has rated it"


_EXCLUSIONS = {
    AdapterState.CANDIDATE: (NEVER_LIVE, "which never went live"),
    AdapterState.ROLLED_BACK: (TAKEN_BACK, "which was rolled back"),
    AdapterState.REVOKED: (TAKEN_BACK, "which was revoked"),
}


@dataclass(frozen=True)
class Exclusion:
    """Why an unrated answer is not gold."""

    kind: str
    """The same for all answers that are excluded for the same reason; they are counted by it."""
    reason: str


@dataclass(frozen=True)
class ServingHistory:
    """Which versions of a profile were live, and when.

    Decides whether an unrated answer may be gold: not if its version never went live, was rolled back or was revoked,
    nor if the bare base served it.
    """

    profile: str
    states: Mapping[str, AdapterState]
    """Of each version, by its name."""
    spans: Sequence[tuple[datetime, datetime | None]]
    """From when till when some version was live; None: it still is. Outside of them the bare base was."""

    trusts_base: bool = False
    """Unrated answers of the bare base may be gold, where it was what was live (experience.mix.unrated_base)."""

    def exclusion(self, served_by: str | None, at: datetime, *, is_served: bool = False) -> Exclusion | None:
        """Return why an unrated answer of that time is not gold. None if it may be, or its version is unknown.

        `is_served`: it came through `tunesmith serve`; what people added or imported is their own data.
        """
        is_base = served_by == f"{self.profile}@base"
        if is_base and any(begin <= at and (end is None or at < end) for begin, end in self.spans):
            return Exclusion(BASE_BESIDE_LIVE, "answered by the bare base while a version was live")
        if is_served and (is_base or served_by is None) and not self.trusts_base:
            return Exclusion(BASE_UNRATED, BASE_UNRATED)
        state = self.states.get(served_by) if served_by is not None else None
        if state not in _EXCLUSIONS:
            return None
        kind, reason = _EXCLUSIONS[state]
        return Exclusion(kind, f"answered by {served_by}, {reason}")
