"""Targets in trouble, as plain SQL."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tunesmith.store.reader import Reader, instant_of

_TROUBLED = """
SELECT d.profile, d.flipped_at, o.target, o.error FROM deployments d JOIN observations o ON o.profile = d.profile
WHERE o.error IS NOT NULL ORDER BY d.profile, o.target"""


@dataclass(frozen=True)
class TroubledTarget:
    """A target that was last seen with an error."""

    profile: str
    target: str
    flipped_at: datetime
    error: str


def troubled(reader: Reader) -> list[TroubledTarget]:
    return [
        TroubledTarget(row["profile"], row["target"], instant_of(row["flipped_at"]), row["error"])
        for row in reader.rows(_TROUBLED)
    ]
