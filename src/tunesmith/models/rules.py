"""An adapter version: immutable weights with lineage; and which of them is live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from tunesmith.core.states import Transitions


class AdapterState(StrEnum):
    CANDIDATE = "candidate"  # nobody has decided against it
    LIVE = "live"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"  # by the gate, by its shadow, or by a person
    REVOKED = "revoked"  # everywhere; no target may load it


A = AdapterState

ADAPTER = Transitions(
    "adapter",
    {
        A.CANDIDATE: frozenset({A.LIVE, A.REJECTED, A.REVOKED}),
        A.LIVE: frozenset({A.SUPERSEDED, A.ROLLED_BACK, A.REVOKED}),
        A.SUPERSEDED: frozenset({A.LIVE, A.REVOKED}),
        A.ROLLED_BACK: frozenset({A.LIVE, A.REVOKED}),
        A.REJECTED: frozenset({A.LIVE, A.REVOKED}),
        A.REVOKED: frozenset(),
    },
)


def version_name(profile: str, version: int) -> str:
    """The name an adapter is served under; never reused."""
    return f"{profile}@v{version}"


def base_name(profile: str) -> str:
    """The name that the bare base of a profile is served under."""
    return f"{profile}@base"


@dataclass(frozen=True)
class LiveMove:
    """A version went live, or stopped being it."""

    at: datetime
    adapter_id: str
    version: int
    new_state: AdapterState
    actor: str
    reason: str


@dataclass(frozen=True)
class LiveSpan:
    """What was live from when till when."""

    version: str
    """The exact name, such as support@v3, or support@base."""
    adapter_id: str | None
    """None: the bare base."""
    since: datetime | None
    """None: since ever."""
    until: datetime | None = None
    """None: it still is."""
    by: str | None = None
    """Who put it live."""
    reason: str = ""
    ended_as: AdapterState | None = None
    """What became of the version then."""
    ended_by: str | None = None
    ended_reason: str = ""

    def covers(self, at: datetime) -> bool:
        return (self.since is None or self.since <= at) and (self.until is None or at < self.until)


def live_spans(profile: str, moves: Iterable[LiveMove]) -> list[LiveSpan]:
    """What was live, without a gap, oldest first; between versions it was the bare base. `moves` are in their order."""
    spans = [LiveSpan(base_name(profile), None, None)]
    for move in moves:
        last = spans[-1]
        if move.new_state is AdapterState.LIVE:
            if last.since == move.at and last.adapter_id is None:
                spans.pop()  # the version before was replaced in the same step
            elif last.until is None:
                spans[-1] = replace(last, until=move.at)
            name = version_name(profile, move.version)
            spans.append(LiveSpan(name, move.adapter_id, move.at, by=move.actor, reason=move.reason))
        elif last.adapter_id == move.adapter_id and last.until is None:
            spans[-1] = replace(
                last, until=move.at, ended_as=move.new_state, ended_by=move.actor, ended_reason=move.reason
            )
            spans.append(LiveSpan(base_name(profile), None, move.at, by=move.actor, reason=move.reason))
    return spans


def live_at(spans: Sequence[LiveSpan], at: datetime) -> LiveSpan:
    """What was live at an instant."""
    return next(span for span in reversed(spans) if span.covers(at) or span.since is None)
