"""The inbox: everything that waits for a person, each with the command that settles it. Quick, however much waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tunesmith.client.held_runs import next_step
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.quarantine import review as quarantine_review
from tunesmith.deployment import queries as deployments
from tunesmith.experience.forgetting import forget
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.queries import experiences, reviews
from tunesmith.experience.review import REJECTED_RUNS
from tunesmith.experience.rules.classes import screens_of
from tunesmith.orchestration.lifecycle import PAUSED_ON_REQUEST
from tunesmith.runs.queries import queue, runs
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskState
from tunesmith.runs.session import Session
from tunesmith.store.database import Tx

_COUNTED = 10_000  # more are "10000 or more"
_LOOKED_AT = 1_000  # of the newest suspects, to tell why they wait
_NAMED = 3
_DATASETS = 100
_RUNS = 1000
_FAILED_FOR = timedelta(days=7)
_AROUND_A_STACK = (
    " ", "\t", "Traceback (most", "Current thread", "Thread 0x", "Stack (most", "Extension modules:", "<truncated",
)  # fmt: skip


@dataclass(frozen=True)
class InboxItem:
    """Something that waits for a person, and what they can do."""

    kind: str
    id: str
    profile: str
    since: datetime
    reason: str
    what_to_do: str
    log: str = ""
    """Failed runs and parked tasks: how the last attempt ended, with the last words of its program."""
    error: str = ""
    """The one line of it that says what went wrong."""
    num: int = 1
    """How many things wait behind this one item, counted up to 10,000."""
    newest: tuple[str, ...] = ()
    """The newest of them, where they are many."""


def read_inbox(session: Session) -> list[InboxItem]:
    """Everything that waits, the oldest first."""
    with session.database.read() as tx:
        items = [
            *_held(tx),
            *_paused(tx),
            *_failed(tx),
            *_parked(tx),
            *_troubled(tx),
            *_suspects(tx),
            *_rejected(tx),
            *_erasures(tx),
        ]
        items += [*_quarantined(tx, session.workspace.data_dir), *_no_room(tx, session.no_room)]
    return sorted(items, key=lambda item: item.since)


def _quarantined(tx: Tx, data_dir: Path) -> Iterator[InboxItem]:
    """Of the newest datasets, those with suspect rows that nobody has decided about."""
    for dataset in datasets.listing(tx, limit=_DATASETS):
        num = quarantine_review.num_undecided(tx, dataset.id, data_dir / dataset.path)
        if num:
            yield InboxItem(
                "rows kept aside",
                dataset.id,
                dataset.profile,
                dataset.created_at,
                f"{num} suspect {'row of the dataset was' if num == 1 else 'rows of the dataset were'} quarantined",
                f"`dataset quarantine {dataset.id}`, then `dataset release`, or the same with `--dismiss`",
                num=num,
            )


def _held(tx: Tx) -> Iterator[InboxItem]:
    for run in runs.listing(tx, states=frozenset({RunState.HELD}), limit=_RUNS):
        what_to_do = next_step(tx, run)
        yield InboxItem("held run", run.id, run.profile, run.moved_at, run.reason, what_to_do)


def _paused(tx: Tx) -> Iterator[InboxItem]:
    """Runs that nobody asked to pause: their profile was disabled or removed."""
    for run in runs.listing(tx, states=frozenset({RunState.PAUSED}), limit=_RUNS):
        if run.reason != PAUSED_ON_REQUEST:
            what_to_do = f"mend the profile, then `run resume {run.id}`; or `run cancel {run.id}`"
            yield InboxItem("paused run", run.id, run.profile, run.moved_at, run.reason, what_to_do)


def _failed(tx: Tx) -> Iterator[InboxItem]:
    """Runs that failed for good, until they are tried again; after a week nobody waits for them any more."""
    failed = runs.listing(tx, states=frozenset({RunState.FAILED}), limit=_RUNS)
    retried = runs.retried(tx, [run.id for run in failed])
    for run in failed:
        if run.id in retried or tx.now - run.moved_at > _FAILED_FOR:
            continue
        attempts = queue.attempts_of_run(tx, run.id)
        log = (attempts[-1].error or "") if attempts else ""
        is_parked = any(task.state is TaskState.PARKED for task in queue.of_run(tx, run.id))
        what_to_do = f"read `run logs {run.id}`, mend the cause, then `run retry {run.id}`"
        yield InboxItem(
            "parked run" if is_parked else "failed run", run.id, run.profile, run.moved_at, run.reason, what_to_do,
            log, telling_line(log),
        )  # fmt: skip


def _no_room(tx: Tx, why: str | None) -> Iterator[InboxItem]:
    """What waits for room on a disk, this one or another."""
    if why is not None:
        yield InboxItem(
            "full disk", "disk", "the workspace", tx.now, f"{why}: nothing is trained or evaluated",
            "free some space; everything that waits goes on by itself",
        )  # fmt: skip
        return
    for task, last in queue.waiting_for_room(tx):
        yield InboxItem(
            f"{task.kind} task without room", task.run_id or task.id, task.profile or "", last.ended_at or tx.now,
            task.reason, "free some space where it says; it is tried again by itself", last.error or "",
            telling_line(last.error or ""),
        )  # fmt: skip


def _parked(tx: Tx) -> Iterator[InboxItem]:
    """Tasks without a run that crashed too often; a run's are told with the run."""
    for task in queue.parked(tx):
        if task.run_id is None:
            log = queue.last_attempt(tx, task.id).error or ""
            yield InboxItem(
                f"parked {task.kind} task", task.id, task.profile or "", task.created_at, task.reason,
                "mend the cause; a worker opens a new one when it is due", log, telling_line(log),
            )  # fmt: skip


def telling_line(log: str) -> str:
    """The last line of an error that is about the error: no frame of a stack, nothing that surrounds one."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(_AROUND_A_STACK)]
    return lines[-1].strip() if lines else ""


def _troubled(tx: Tx) -> Iterator[InboxItem]:
    for deployment in deployments.listing(tx):
        for seen in deployments.observed(tx, deployment.profile):
            if seen.error is not None:
                yield InboxItem(
                    f"target {seen.target}", deployment.profile, deployment.profile, deployment.flipped_at, seen.error,
                    "mend the target; a worker brings it to what is wanted",
                )  # fmt: skip


def _suspects(tx: Tx) -> Iterator[InboxItem]:
    for profile in reviews.profiles_known(tx):
        num, _ = reviews.num_waiting(tx, profile, _COUNTED)
        if not num:
            continue
        newest = reviews.suspicions_waiting(tx, profile, _LOOKED_AT)
        why = Counter(screen for _, suspicions in newest for screen in screens_of(suspicions))
        told = ", ".join(f"{screen} {count}" for screen, count in why.most_common())
        among = f" (of the newest {_LOOKED_AT})" if num > _LOOKED_AT else ""
        yield InboxItem(
            "suspects",
            profile,
            profile,
            experiences.get(tx, newest[0][0]).created_at,
            f"{_counted(num)} suspect {'experience waits' if num == 1 else 'experiences wait'}: {told}{among}",
            f"`experience review {profile}`, then `--accept` or `--reject` with a reason",
            num=num,
            newest=tuple(each for each, _ in newest[:_NAMED]),
        )


def _rejected(tx: Tx) -> Iterator[InboxItem]:
    for profile in reviews.profiles_known(tx):
        _, num = reviews.num_waiting(tx, profile, _COUNTED)
        if num:
            newest = reviews.ids_in_review(tx, profile, _NAMED)
            yield InboxItem(
                REJECTED_RUNS,
                profile,
                profile,
                experiences.get(tx, newest[0]).created_at,
                f"{_counted(num)} {'experience was' if num == 1 else 'experiences were'} in two rejected runs",
                f"`experience review {profile}`, then `--accept` or `--reject` with a reason",
                num=num,
                newest=tuple(newest),
            )


def _erasures(tx: Tx) -> Iterator[InboxItem]:
    for pending in erasures.pending(tx):
        dataset = datasets.get(tx, pending.dataset_id)
        reading = forget.readers_of(tx, pending)
        why = "a worker rewrites it at its next sweep"
        what_to_do = f"start a worker; if it stays, `dataset verify {dataset.id}` says why: remove its folder then"
        if reading:
            why = f"{', '.join(reading[:_NAMED])} still {'reads' if len(reading) == 1 else 'read'} it"
            what_to_do = f"wait, or `experience forget {pending.experience_ids[0]} --stop-runs`"
        elif failure := forget.last_failure(tx, dataset.id, pending.since):
            why = f"the rewrite failed: {failure}"
            what_to_do = (
                f"mend that, then `experience forget {pending.experience_ids[0]}`; "
                f"if `dataset verify {dataset.id}` says that it is damaged, remove its folder first"
            )
        num = len(pending.experience_ids)
        yield InboxItem(
            "erasure",
            dataset.id,
            dataset.profile,
            pending.since,
            f"the text of {num} forgotten {'experience' if num == 1 else 'experiences'} is still in it: {why}",
            what_to_do,
            num=num,
            newest=pending.experience_ids[-_NAMED:],
        )


def _counted(num: int) -> str:
    return f"{num} or more" if num >= _COUNTED else str(num)
