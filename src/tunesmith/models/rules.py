"""An adapter version: immutable weights with lineage; and which of them is live."""

from __future__ import annotations

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
