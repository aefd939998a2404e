"""The `shadow` section of a profile: whether a candidate answers live traffic unseen before it may go live."""

from __future__ import annotations

from pydantic import Field, model_validator

from tunesmith.core.section import Section, Share


class ShadowSettings(Section):
    enabled: bool = False
    """Whether a promoted candidate is shown mirrored traffic first; its answers are never shown to anybody."""
    share: Share = 1.0
    """Share of the live requests that are mirrored, by the hash of their id."""
    beside_live: bool = False
    """Whether mirrored requests may share the engine with live ones, where traffic never pauses; each costs a row."""
    min_count: int = Field(default=50, ge=1, le=1_000_000)
    """Fewest mirrored answers; fewer never suffice, however long it takes."""
    min_s: float = Field(default=3600.0, ge=0.0, le=30 * 24 * 3600.0)
    """Shortest time of mirroring; less never suffices, however many answers there are."""
    max_s: float = Field(default=24 * 3600.0, gt=0.0, le=90 * 24 * 3600.0)
    """After this long without enough answers the candidate is rejected."""
    max_failures: Share = 0.02
    """Most of the mirrored requests that the candidate may fail or time out on."""
    max_drop: Share = 0.05
    """How much smaller its share of answers without a flag of the verifiers may be than that of what is live."""
    interval_s: float = Field(default=10.0, gt=0.0)
    """Time between two looks at the observations."""

    @model_validator(mode="after")
    def _time_enough(self) -> ShadowSettings:
        if self.max_s <= self.min_s:
            raise ValueError("shadow.max_s: must be longer than shadow.min_s")
        return self
