"""What the client returns: plain frozen values that turn into JSON the same way everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.models.listings import ListedAdapter
from tunesmith.models.listings import ListedRun as RunView

if TYPE_CHECKING:
    from tunesmith.client.attempt_progress import AttemptProgress

__all__ = [
    "MAX_LISTED",
    "AdapterView",
    "AttemptView",
    "DeploymentView",
    "EvaluationView",
    "EventView",
    "ExportedFile",
    "PlannedRun",
    "ProgressView",
    "RequestResult",
    "RunDetail",
    "RunView",
    "ShadowView",
    "SubmittedView",
    "adapter_view",
    "to_json",
]
MAX_LISTED = 10_000
"""The most that one listing shows."""


def to_json(value: Any) -> Any:
    """A view as JSON holds it: ISO instants, plain names for enums, no paths as objects."""
    if hasattr(value, "model_dump"):  # a pydantic model; importing pydantic to ask would slow every listing
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class ExportedFile:
    """A dataset, or a part of one, written for other tools."""

    dataset_id: str
    path: Path
    form: str
    num_examples: int
    num_bytes: int


@dataclass(frozen=True)
class AttemptView:
    id: str
    task: str
    number: int
    outcome: str
    error_class: str | None
    error: str | None
    worker_id: str
    started_at: datetime
    ended_at: datetime | None
    result: dict[str, Any] | None


@dataclass(frozen=True)
class EventView:
    at: datetime
    action: str
    actor: str
    old_state: str | None
    new_state: str | None
    reason: str


@dataclass(frozen=True)
class EvaluationView:
    id: str
    decision: str
    reasons: tuple[str, ...]
    num_cases: int
    confidence: float
    comparisons: tuple[dict[str, Any], ...]
    evidence: dict[str, str]
    scores_path: str
    created_at: datetime
    checks: tuple[dict[str, Any], ...] = ()
    """Every check with actual, threshold, setting, its origin, n and whether it passed; none in older verdicts."""
    established: dict[str, Any] | None = None
    """The primary metric on the cases of earlier, proven datasets alone."""


@dataclass(frozen=True)
class ShadowView:
    """What a candidate made of mirrored traffic; the answers themselves are shown nowhere."""

    num: int
    min_count: int
    num_failed: int
    num_timed_out: int
    num_flagged: int
    """Of its answers, those that a verifier of the profile says something against."""
    num_live_flagged: int
    """Of the live answers to the same requests."""
    seconds: float | None
    live_seconds: float | None
    since: datetime | None


@dataclass(frozen=True)
class RunDetail:
    """Everything about one run."""

    run: RunView
    spec: dict[str, Any]
    attempts: tuple[AttemptView, ...]
    evaluation: EvaluationView | None
    requests: tuple[dict[str, Any], ...]
    events: tuple[EventView, ...]
    shadow: ShadowView | None = None
    """How far its candidate has come with mirrored traffic; None where there was none."""
    watch: tuple[dict[str, Any], ...] = ()
    """What the watch compared when it ended, signal by signal: both means with their n, bound and error probability."""
    num_erased: int = 0
    """Forgotten experiences that were taken out of its dataset since; its fingerprint is another one by now."""
    progress: AttemptProgress | None = None
    """How far the program that works on it has come; None while none does."""
    what_to_do: str | None = None
    """Of a held run: the command that settles it."""


@dataclass(frozen=True)
class SubmittedView:
    id: str
    dataset_id: str
    estimate_s: float
    estimate_basis: str
    waits_for: str | None
    is_new: bool
    warning: str | None
    memory: str | None


@dataclass(frozen=True)
class PlannedRun:
    """An unfinished run and what is known about its training before it is done."""

    run: RunView
    num_examples: int
    estimate_s: float | None
    estimate_basis: str


@dataclass(frozen=True)
class ProgressView:
    """Where a run is right now."""

    state: str
    reason: str
    waits_for: str | None
    phase: str | None = None
    done: int = 0
    total: int = 0
    unit: str = ""
    metrics: Mapping[str, float] | None = None
    left_s: float | None = None
    """Until the last step, at the pace of the newest ones."""
    is_over: bool = False
    what_to_do: str | None = None
    """Of a held run: the command that settles it."""


@dataclass(frozen=True)
class AdapterView:
    id: str
    name: str
    profile: str
    version: int
    state: str
    run_id: str | None
    run_state: str | None
    """Of the run that made it."""
    digest: str
    path: Path
    metrics: dict[str, float]
    created_at: datetime
    targets: tuple[dict[str, Any], ...] = ()
    """`show` alone: the targets that serve it, or should."""
    events: tuple[EventView, ...] = ()
    """`show` alone: what became of it, with how close each target was when it went live."""
    evaluation: EvaluationView | None = None
    """`show` alone: how it was judged last."""


def adapter_view(adapter: ListedAdapter, data_dir: Path) -> AdapterView:
    return AdapterView(name=adapter.name, **{**vars(adapter), "path": data_dir / adapter.path})


@dataclass(frozen=True)
class DeploymentView:
    profile: str
    wanted: str | None
    previous: str | None
    flipped_at: datetime | None
    flipped_by: str | None
    targets: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class RequestResult:
    """What came of a wish."""

    id: str
    state: str
    message: str
    request_id: str | None = None
