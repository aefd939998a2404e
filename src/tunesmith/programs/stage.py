"""What a stage gets from the worker, and what it gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.core.errors import LeaseLost
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.launch import RunningProgram, tail_of_log
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AttemptRef
from tunesmith.store.database import Database, Tx, patiently

T = TypeVar("T")
_STORE_RETRY_S = 0.5


class Pulse:
    """The link between a stage and the heartbeat thread: progress goes one way, "stop" and "lost" the other."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """The worker was told to end: checkpoint and give the task back."""
        self.lost = threading.Event()
        """The lease is somebody else's: end the program, change nothing."""
        self.program: RunningProgram | None = None
        """What the heartbeat keeps alive."""
        self._moved = threading.Event()

    def progress(self) -> None:
        """The stage got a step further."""
        self._moved.set()

    def has_moved(self) -> bool:
        """Whether there was progress since the last look."""
        moved = self._moved.is_set()
        self._moved.clear()
        return moved

    def raise_if_lost(self) -> None:
        if self.lost.is_set():
            raise LeaseLost("the lease ran out; the work is left as it is, for whoever holds the task now")


@dataclass(frozen=True)
class StageContext:
    database: Database
    workspace: Workspace
    settings: Settings
    claim: Claim
    worker_id: str
    pulse: Pulse

    def write(self, action: Callable[[Tx], T]) -> T:
        """One writing transaction; waits out a store that cannot be reached for as long as the lease is ours."""
        return self._patiently(self.database.write, action)

    def read(self, action: Callable[[Tx], T]) -> T:
        """One reading transaction, as patient as `write`."""
        return self._patiently(self.database.read, action)

    def _patiently(self, open_tx: Callable[[], AbstractContextManager[Tx]], action: Callable[[Tx], T]) -> T:
        def transact() -> T:
            self.pulse.raise_if_lost()
            with open_tx() as tx:
                return action(tx)

        def wait(seconds: float) -> bool:
            self.pulse.lost.wait(seconds)
            return False  # the next try says that the lease is lost

        return patiently(transact, wait, max_wait_s=_STORE_RETRY_S)

    @property
    def run_id(self) -> str:
        assert self.claim.task.run_id is not None
        return self.claim.task.run_id

    @property
    def attempt_dir(self) -> Path:
        return self.workspace.runs_dir / self.run_id / self.claim.attempt.id

    @property
    def attempt_ref(self) -> AttemptRef:
        """Our attempt, as a program's spec names it."""
        attempt = self.claim.attempt
        return AttemptRef(
            task_id=attempt.task_id,
            attempt_id=attempt.id,
            number=attempt.number,
            token=attempt.token,
            lease_s=self.settings.worker.lease_s,
        )

    def with_log(self, error: str) -> str:
        """An error with the last words of the program, so that a parked task can be understood from the inbox."""
        tail = tail_of_log(self.attempt_dir, 2048).strip()
        # PostgreSQL's texts hold no NUL
        shown = "".join(char if char.isprintable() or char in "\n\t" else "�" for char in tail)
        return f"{error}\n{shown}" if shown else error


class StageFact:
    """What a stage found out or made; `orchestration/lifecycle.py` turns it into the run's next state."""


@dataclass(frozen=True)
class Trained(StageFact):
    """A verified adapter, published in the workspace."""

    path: str
    digest: str
    metrics: dict[str, float]
    stopped_early: bool


@dataclass(frozen=True)
class DryRunPassed(StageFact):
    pass


@dataclass(frozen=True)
class DeviceBusy(StageFact):
    """Nothing was begun: serving computes on the device, and was asked to step aside."""

    reason: str
    again_s: float


@dataclass(frozen=True)
class Forbidden(StageFact):
    """Nothing was begun: the profile was disabled or removed since the run was submitted."""

    why: str


@dataclass(frozen=True)
class Flipped(StageFact):
    """The adapter is live and every target serves it."""


@dataclass(frozen=True)
class NotFlipped(StageFact):
    """Nothing changed: what is live moved on (`stale`), a target or the profile refused, a watch is still open
    (`later`), the version was revoked, or it was live already and somebody took it back (`moved_on`)."""

    why: str
    kind: str  # stale | refused | later | revoked | moved_on


@dataclass(frozen=True)
class Looked(StageFact):
    """One look of the watch: still going, over, or bad enough to roll back; or one at a candidate's shadow."""

    decision: str  # again | healthy | roll_back | moved_on; of a shadow: again | passed | failed
    reason: str
    num_failures: int = 0
    evidence: tuple[dict[str, Any], ...] = ()
    """What live answers showed, signal by signal; kept with the run's last event."""
    again_s: float | None = None
    """When to look again; None: after the interval that the profile says."""

    @property
    def detail(self) -> dict[str, Any]:
        """What the event of the run keeps of it."""
        return {"watch": list(self.evidence)} if self.evidence else {}


@dataclass(frozen=True)
class Reconciled(StageFact):
    pass


@dataclass(frozen=True)
class StageEnd:
    """How the attempt ended, and what came of it."""

    outcome: AttemptState
    fact: StageFact | None = None
    error_class: ErrorClass | None = None
    error: str | None = None
    decided_by: RequestKind | None = None
    """The request that ended the attempt, if one did."""
    result: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def succeeded(cls, fact: StageFact, result: dict[str, Any] | None = None) -> StageEnd:
        return cls(AttemptState.SUCCEEDED, fact=fact, result=result or {})

    @classmethod
    def failed(cls, error_class: ErrorClass, error: str) -> StageEnd:
        return cls(AttemptState.FAILED, error_class=error_class, error=error)

    @classmethod
    def no_room(cls, error: str) -> StageEnd:
        """The disk is full, over quota or read-only: free, and tried again when there is room."""
        return cls(AttemptState.INTERRUPTED, error_class=ErrorClass.DISK, error=error)

    @classmethod
    def device_busy(cls, device: DeviceBusy) -> StageEnd:
        return cls(AttemptState.INTERRUPTED, fact=device, error=device.reason)

    @classmethod
    def cancelled(cls) -> StageEnd:
        return cls(AttemptState.CANCELLED, error="cancelled on request", decided_by=RequestKind.CANCEL)
