"""A task: one leased piece of long work, its attempts, and the table that says which are tried again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tunesmith.core.states import Transitions


class TaskKind(StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"
    DEPLOY = "deploy"
    WATCH = "watch"
    RECONCILE = "rollback"  # bring the targets back to what is wanted; goes on under e-stop, unlike deploy
    CURRICULUM = "curriculum"
    PREPARE = "prepare"
    EXPORT = "export"


STOPPED_BY_ESTOP = frozenset({TaskKind.TRAIN, TaskKind.CURRICULUM, TaskKind.DEPLOY})
NEEDS_ROOM = frozenset({TaskKind.TRAIN, TaskKind.EVALUATE, TaskKind.CURRICULUM})
"""What no worker begins on a full disk; a rollback, a deployment and a watch are tried all the same."""


class TaskState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    PARKED = "parked"
    CANCELLED = "cancelled"


T = TaskState

TASK = Transitions(
    "task",
    {
        T.WAITING: frozenset({T.LEASED, T.CANCELLED}),
        T.LEASED: frozenset({T.DONE, T.WAITING, T.PARKED, T.CANCELLED}),
        T.DONE: frozenset(),
        T.PARKED: frozenset(),
        T.CANCELLED: frozenset(),
    },
)


class AttemptState(StrEnum):
    """An attempt is open, or it has ended with an outcome that never changes."""

    OPEN = "open"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by a live check
    INTERRUPTED = "interrupted"  # resumable: TERM, pause, hand-over, disk full, e-stop
    LOST = "lost"  # the lease ran out
    CANCELLED = "cancelled"


A = AttemptState

ATTEMPT = Transitions(
    "attempt",
    {A.OPEN: frozenset(set(A) - {A.OPEN}), **{state: frozenset() for state in A if state != A.OPEN}},
)


class ErrorClass(StrEnum):
    """Why an attempt failed, as far as the retry table needs to know."""

    CRASH = "crash"  # a signal, or an exit without a result
    OOM = "oom"  # out of memory on device or host
    TRANSIENT = "transient"  # an I/O error that may pass
    DISK = "disk"  # no space, no inodes, over quota, or read-only
    STALLED = "stalled"  # no progress within its phase's deadline
    CONFIG = "config"  # the spec cannot work
    DATA = "data"  # the dataset cannot work, or is not what its fingerprint says
    PROTOCOL = "protocol"  # malformed events or result
    MISMATCH = "mismatch"  # the result is not what the spec asked for
    NONFINITE = "nonfinite"  # NaN or Inf in loss, gradient or weights
    BUDGET = "budget"  # outran its budget and had to be ended from outside
    TARGET = "target"  # a target cannot load the adapter
    MISSING = "missing"  # a package or file the program needs is not there
    BUG = "bug"  # an exception nobody foresaw


class RetryRule(StrEnum):
    AGAIN = "again"  # with backoff, up to MAX_ERRORS
    SMALLER = "smaller"  # once more with smaller micro-batches
    CRASHED = "crashed"  # with backoff, up to MAX_CRASHES, then parked
    WAITS = "waits"  # free, with growing pauses, until there is room
    NEVER = "never"


RETRY_TABLE: dict[ErrorClass, RetryRule] = {
    ErrorClass.CRASH: RetryRule.CRASHED,
    ErrorClass.OOM: RetryRule.SMALLER,
    ErrorClass.TRANSIENT: RetryRule.AGAIN,
    ErrorClass.DISK: RetryRule.WAITS,
    ErrorClass.STALLED: RetryRule.CRASHED,
    ErrorClass.CONFIG: RetryRule.NEVER,
    ErrorClass.DATA: RetryRule.NEVER,
    ErrorClass.PROTOCOL: RetryRule.NEVER,
    ErrorClass.MISMATCH: RetryRule.NEVER,
    ErrorClass.NONFINITE: RetryRule.NEVER,
    ErrorClass.BUDGET: RetryRule.NEVER,
    ErrorClass.TARGET: RetryRule.NEVER,
    ErrorClass.MISSING: RetryRule.NEVER,
    ErrorClass.BUG: RetryRule.NEVER,
}

MAX_CRASHES = 3
MAX_ERRORS = 3
MAX_SHRINKS = 1
UNASKED_DELAY_S = 30.0


@dataclass(frozen=True)
class Counts:
    """How often a task has failed so far, by kind; crashes and errors are counted apart."""

    num_crashes: int = 0
    num_errors: int = 0
    num_shrinks: int = 0


@dataclass(frozen=True)
class RetryDecision:
    """What happens to the task: waits again after `delay_s`, is done, or is parked; with the new counts."""

    state: TaskState
    counts: Counts
    delay_s: float
    reason: str


@dataclass(frozen=True)
class DiskWait:
    """What a task that waits for room says, and how often it has waited before."""

    why: str = "no space left"
    num_before: int = 0

    @property
    def pause_s(self) -> float:
        """2, 4, 8 … seconds, at most a minute."""
        return float(min(60, 2 ** min(self.num_before + 1, 6)))


def after_attempt(
    outcome: AttemptState, error: ErrorClass | None, counts: Counts, disk: DiskWait = DiskWait()
) -> RetryDecision:
    """The retry table. Requests, preemption, disk trouble and e-stop (`interrupted`) are free.

    One that came by itself carries an error class: it waits a while, or it would keep a worker spinning.
    """
    if outcome in (A.INTERRUPTED, A.FAILED) and error is ErrorClass.DISK:
        return RetryDecision(T.WAITING, counts, disk.pause_s, disk.why)
    match outcome:
        case A.SUCCEEDED | A.STOPPED:
            return RetryDecision(T.DONE, counts, 0.0, outcome.value)
        case A.CANCELLED:
            return RetryDecision(T.CANCELLED, counts, 0.0, "cancelled")
        case A.INTERRUPTED:
            delay_s = 0.0 if error is None else UNASKED_DELAY_S
            return RetryDecision(T.WAITING, counts, delay_s, "interrupted; resumes from its last checkpoint")
        case A.LOST:
            return _crashed(counts, "the worker's lease ran out")
        case A.FAILED:
            return _failed(error or ErrorClass.BUG, counts)
        case A.OPEN:
            raise ValueError("the attempt has not ended")


def _failed(error: ErrorClass, counts: Counts) -> RetryDecision:
    match RETRY_TABLE[error]:
        case RetryRule.CRASHED:
            return _crashed(counts, f"the program ended by {error}")
        case RetryRule.SMALLER:
            after = Counts(counts.num_crashes, counts.num_errors, counts.num_shrinks + 1)
            if after.num_shrinks <= MAX_SHRINKS:
                return RetryDecision(T.WAITING, after, 1.0, "out of memory; again with smaller micro-batches")
            return RetryDecision(T.DONE, after, 0.0, "out of memory, also with smaller micro-batches")
        case RetryRule.AGAIN:
            after = Counts(counts.num_crashes, counts.num_errors + 1, counts.num_shrinks)
            if after.num_errors < MAX_ERRORS:
                reason = f"{error} error {after.num_errors} of {MAX_ERRORS}; tried again"
                return RetryDecision(T.WAITING, after, backoff_s(after.num_errors), reason)
            return RetryDecision(T.DONE, after, 0.0, f"{MAX_ERRORS} {error} errors")
        case RetryRule.WAITS:
            raise ValueError("disk trouble is decided before the counts are looked at")
        case RetryRule.NEVER:
            return RetryDecision(T.DONE, counts, 0.0, f"{error} errors are not tried again")


def _crashed(counts: Counts, why: str) -> RetryDecision:
    after = Counts(counts.num_crashes + 1, counts.num_errors, counts.num_shrinks)
    if after.num_crashes < MAX_CRASHES:
        reason = f"{why}; crash {after.num_crashes} of {MAX_CRASHES}, tried again"
        return RetryDecision(T.WAITING, after, backoff_s(after.num_crashes), reason)
    return RetryDecision(T.PARKED, after, 0.0, f"parked after {MAX_CRASHES} crashes: {why}")


def backoff_s(failures: int) -> float:
    """1, 4, 16 … seconds, at most five minutes."""
    return float(min(300, 4 ** max(0, failures - 1)))
