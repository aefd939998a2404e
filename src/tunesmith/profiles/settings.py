"""Settings of a workspace, apart from any profile: where the store is, how workers keep time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tunesmith.core.section import Section
from tunesmith.profiles.workspace import MIN_FREE_MB


class Phase(StrEnum):
    """What the program is busy with; each phase has its own deadline for progress."""

    LOAD = "load"
    HASH = "hash"
    TRAIN = "train"
    VALIDATE = "validate"
    SAVE = "save"
    SCORE = "score"
    GENERATE = "generate"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

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
    """sqlite:///FILE, relative to the workspace, or postgresql://USER@HOST/DATABASE; unset: .tunesmith/store.db."""

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
    triggers_s: Seconds = 60.0
    """How often the worker that holds the scheduler's lease looks whether a campaign's next round is due."""
    targets_s: Seconds = 30.0
    """How often an idle worker looks whether the targets serve what is wanted."""
    grace_s: float = Field(default=10.0, ge=0.0)
    """Time a program gets between TERM and KILL."""
    min_free_mb: float = Field(default=MIN_FREE_MB, ge=0.0)
    """While less is free under the workspace (10^6 bytes), nothing is trained or evaluated; 0: never looked at."""
    pass_environment: tuple[str, ...] = ()
    """Variables that trainers, evaluators, local teachers and engines see besides the usual ones, such as HF_TOKEN."""
    phase_deadlines_s: dict[Phase, Seconds] = Field(default_factory=PHASE_DEADLINES_S.copy, validate_default=True)
    """Longest time without progress, by phase; after it the program counts as stalled."""

    @field_validator("pass_environment")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _VARIABLE.match(name):
                raise ValueError("must be names of variables, such as HF_TOKEN; values are not given here")
        return value

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


class HandOverSettings(Section):
    aliases: ClassVar[Mapping[str, str]] = {"patience_s": "unused_timeout_s", "requests": "when_released"}

    shares_device: Literal["auto", "always", "never"] = "auto"
    """Whether training needs the device that serving holds; auto: where both use a GPU of the same machine."""
    when_released: Literal["queue", "refuse"] = "queue"
    """Requests while the device is released to training: wait up to serve.timeout_s, or get 503 with Retry-After."""
    mode: Literal["unload", "cpu"] = "unload"
    """unload: nothing is answered meanwhile; cpu: answered slowly, on the CPU."""
    drain_s: float = Field(default=30.0, ge=0.0)
    """How long answers under way may go on before the device is given."""
    unused_timeout_s: Seconds = 120.0
    """The server reclaims a released device on which no training has run for this long."""


class ServeSettings(Section):
    aliases: ClassVar[Mapping[str, str]] = {"hysteresis_s": "min_residency_s"}

    host: str = "127.0.0.1"
    """Where to listen; anything but loopback needs serve.key_file."""
    port: int = Field(default=8321, ge=0, le=65535)
    """0 takes any free port."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which this server may be asked, beside loopback's; others are refused, so that no web page drives it."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages (scheme://host:port) that may ask; none by default."""
    key_file: str | None = None
    """File with one API key a line, `KEY [scopes] [label=NAME]`, relative to the workspace; then requests need one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine computes."""
    max_body_bytes: int = Field(default=4 << 20, ge=1024, le=1 << 30)
    """Largest body of a request."""
    max_batch: int = Field(default=32, ge=1, le=1024)
    """Most answers written at once by one engine."""
    max_waiting: int = Field(default=256, ge=0, le=100_000)
    """Most requests that wait for their turn; more get 429 with Retry-After."""
    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """Most tokens of one answer; a request, or answers.max_tokens of its profile, may say fewer."""
    max_feedback_per_minute: int = Field(default=600, ge=1, le=1_000_000)
    """Most feedback that one API key may send in a minute; more gets 429 with Retry-After."""
    timeout_s: Seconds = 120.0
    """Longest time for one answer, waiting included."""
    grace_s: float = Field(default=20.0, ge=0.0)
    """Time that answers under way get after TERM."""
    max_adapters: int = Field(default=8, ge=1, le=4096)
    """Most adapter versions in an engine's memory; the least recently used is evicted first, never one in use."""
    min_residency_s: float = Field(default=60.0, ge=0.0)
    """An adapter that was used within this time is not evicted to load another one."""
    max_engines: int = Field(default=2, ge=1, le=64)
    """Most base models in memory at once."""
    max_memory_gb: float | None = Field(default=None, gt=0.0)
    """An engine whose process takes more than this (GB of 2^30 bytes) is ended and started again; unset: no limit."""
    engine_hang_s: float = Field(default=10.0, ge=1.0, le=3600.0)
    """An engine that gives no sign of life for so long is ended and replaced; computing and loading are such signs."""
    follow_s: Seconds = 0.5
    """How often the server looks in the store for what is wanted live."""
    hand_over: HandOverSettings = HandOverSettings()
    """What happens when training needs the device that serving holds."""


class Settings(Section):
    """What tunesmith.yaml, the environment and the command line say about the workspace itself."""

    store: StoreSettings = StoreSettings()
    """Where runs, tasks and everything else is recorded."""
    worker: WorkerSettings = WorkerSettings()
    """How workers hold tasks and watch programs."""
    serve: ServeSettings = ServeSettings()
    """How `tunesmith serve` listens, and what it may use."""
