"""Settings of a workspace, apart from any profile: where the store is, how workers keep time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from tunesmith.domain.profile import Section
from tunesmith.domain.program import Phase

Seconds = Annotated[float, Field(gt=0.0)]

PHASE_DEADLINES_S: dict[Phase, float] = {
    Phase.LOAD: 600.0,
    Phase.HASH: 600.0,
    Phase.TRAIN: 600.0,
    Phase.VALIDATE: 600.0,
    Phase.SAVE: 300.0,
    Phase.SCORE: 600.0,
    Phase.GENERATE: 600.0,
}


class StoreSettings(Section):
    url: str | None = None
    """Where the store is: sqlite:///FILE or postgresql://USER@HOST/DATABASE; unset takes .tunesmith/store.db."""

    @field_validator("url")
    @classmethod
    def _known_database(cls, value: str | None) -> str | None:
        # The text may hold a password, so the message never repeats it.
        if value is not None and not value.startswith(("sqlite:///", "postgresql://")):
            raise ValueError("must begin with sqlite:/// or postgresql://")
        return value


class WorkerSettings(Section):
    lease_s: Seconds = 30.0
    """How long a task stays with a worker that is no longer heard of."""
    heartbeat_s: Seconds = 10.0
    """How often a worker renews its lease; less than half of lease_s, so that one lost beat costs nothing."""
    sweep_s: Seconds = 5.0
    """How often a worker looks for tasks whose lease ran out."""
    poll_s: Seconds = 0.5
    """How often an idle worker looks for a new task."""
    grace_s: float = Field(default=10.0, ge=0.0)
    """Time a program gets between TERM and KILL."""
    phase_deadlines_s: dict[Phase, Seconds] = Field(default_factory=PHASE_DEADLINES_S.copy, validate_default=True)
    """Longest time without progress, by phase; after it the program counts as stalled."""

    @field_validator("phase_deadlines_s")
    @classmethod
    def _every_phase(cls, value: dict[Phase, float]) -> dict[Phase, float]:
        return {**PHASE_DEADLINES_S, **value}

    @model_validator(mode="after")
    def _beats_in_time(self) -> WorkerSettings:
        if self.heartbeat_s >= self.lease_s / 2:
            raise ValueError(
                f"worker.heartbeat_s: {self.heartbeat_s:g} must be less than half of worker.lease_s ({self.lease_s:g})"
            )
        return self


class Settings(Section):
    """What tunesmith.yaml, the environment and the command line say about the workspace itself."""

    store: StoreSettings = StoreSettings()
    """Where runs, tasks and everything else is recorded."""
    worker: WorkerSettings = WorkerSettings()
    """How workers hold tasks and watch programs."""
