"""The inbox: everything that waits for a person, each with the command that settles it. Quick, however much waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tunesmith.client.held_runs import next_step
from tunesmith.datasets import listings as datasets
from tunesmith.datasets.quarantine.undecided import num_quarantined, num_undecided
from tunesmith.deployment import listings as deployments
from tunesmith.evaluation import listings as evaluations
from tunesmith.experience import listings as experiences
from tunesmith.experience.rules.experience import REJECTED_RUNS, screens_of
from tunesmith.runs import listings as runs
from tunesmith.runs.session import Session
from tunesmith.store.reader import Reader

_COUNTED = 10_000  # more are "10000 or more"
_LOOKED_AT = 1_000  # of the newest suspects, to tell why they wait
_NAMED = 3
_DATASETS = 100
_RUNS = 1000
_TASKS = 100
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
    no_room, data_dir = session.no_room, session.workspace.data_dir

    def look(reader: Reader) -> tuple[list[InboxItem], bool]:
        items = [
            *_held(reader),
            *_paused(reader),
            *_failed(reader),
            *_parked(reader),
            *_troubled(reader),
            *_suspects(reader),
            *_rejected(reader),
            *_quarantined(reader, data_dir),
            *_no_room(reader, no_room),
        ]
        return items, experiences.has_erasures(reader)

    items, has_erasures = session.look(look)
    if has_erasures:  # rare, and told from what forgetting itself knows
        from tunesmith.client.pending_erasures import read_erasures

        items += read_erasures(session)
    return sorted(items, key=lambda item: item.since)


def _quarantined(reader: Reader, data_dir: Path) -> Iterator[InboxItem]:
    """Of the newest datasets, those with suspect rows that nobody has decided about."""
    newest = datasets.newest(reader, limit=_DATASETS)
    suspect = [dataset for dataset in newest if num_quarantined(data_dir / dataset.path)]
    decisions = datasets.decisions(reader, [dataset.id for dataset in suspect])
    for dataset in suspect:
        num = num_undecided(data_dir / dataset.path, decisions[dataset.id])
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


def _held(reader: Reader) -> Iterator[InboxItem]:
    for run in evaluations.held(reader, limit=_RUNS):
        yield InboxItem("held run", run.id, run.profile, run.since, run.reason, next_step(run))


def _paused(reader: Reader) -> Iterator[InboxItem]:
    for run in runs.paused_unasked(reader, limit=_RUNS):
        what_to_do = f"fix the profile, then `run resume {run.id}`; or `run cancel {run.id}`"
        yield InboxItem("paused run", run.id, run.profile, run.since, run.reason, what_to_do)


def _failed(reader: Reader) -> Iterator[InboxItem]:
    """Runs that failed for good, until they are tried again; after a week nobody waits for them any more."""
    for run in runs.failed(reader, within=_FAILED_FOR, limit=_RUNS):
        what_to_do = f"read `run logs {run.id}`, fix the cause, then `run retry {run.id}`"
        kind = "parked run" if run.is_parked else "failed run"
        yield InboxItem(
            kind, run.id, run.profile, run.since, run.reason, what_to_do, run.error, telling_line(run.error)
        )


def _no_room(reader: Reader, why: str | None) -> Iterator[InboxItem]:
    """What waits for room on a disk, this one or another."""
    if why is not None:
        yield InboxItem(
            "full disk", "disk", "the workspace", reader.now, f"{why}: nothing is trained or evaluated",
            "free some space; everything that waits goes on by itself",
        )  # fmt: skip
        return
    for task in runs.without_room(reader, limit=_TASKS):
        yield InboxItem(
            f"{task.kind} task without room", task.id, task.profile, task.since, task.reason,
            "free some space where it says; it is tried again by itself", task.error, telling_line(task.error),
        )  # fmt: skip


def _parked(reader: Reader) -> Iterator[InboxItem]:
    """Tasks without a run that crashed too often; a run's are told with the run."""
    for task in runs.parked(reader):
        yield InboxItem(
            f"parked {task.kind} task", task.id, task.profile, task.since, task.reason,
            "fix the cause; a worker opens a new one when it is due", task.error, telling_line(task.error),
        )  # fmt: skip


def telling_line(log: str) -> str:
    """The last line of an error that is about the error: no frame of a stack, nothing that surrounds one."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(_AROUND_A_STACK)]
    return lines[-1].strip() if lines else ""


def _troubled(reader: Reader) -> Iterator[InboxItem]:
    for seen in deployments.troubled(reader):
        yield InboxItem(
            f"target {seen.target}", seen.profile, seen.profile, seen.flipped_at, seen.error,
            "fix the target; a worker brings it to what is wanted",
        )  # fmt: skip


def _suspects(reader: Reader) -> Iterator[InboxItem]:
    for profile in experiences.profiles_known(reader):
        waiting = experiences.suspects(reader, profile, at_most=_COUNTED, looked_at=_LOOKED_AT)
        if waiting is None:
            continue
        num, why = waiting.num, Counter(screen for each in waiting.suspicions for screen in screens_of(each))
        told = ", ".join(f"{screen} {count}" for screen, count in why.most_common())
        among = f" (of the newest {_LOOKED_AT})" if num > _LOOKED_AT else ""
        yield InboxItem(
            "suspects",
            profile,
            profile,
            waiting.since,
            f"{_counted(num)} suspect {'experience waits' if num == 1 else 'experiences wait'}: {told}{among}",
            f"`experience review {profile}`, then `--accept` or `--reject` with a reason",
            num=num,
            newest=waiting.newest[:_NAMED],
        )


def _rejected(reader: Reader) -> Iterator[InboxItem]:
    for profile in experiences.profiles_known(reader):
        waiting = experiences.after_rejected_runs(reader, profile, at_most=_COUNTED, named=_NAMED)
        if waiting is not None:
            num = waiting.num
            yield InboxItem(
                REJECTED_RUNS,
                profile,
                profile,
                waiting.since,
                f"{_counted(num)} {'experience was' if num == 1 else 'experiences were'} in two rejected runs",
                f"`experience review {profile}`, then `--accept` or `--reject` with a reason",
                num=num,
                newest=waiting.newest,
            )


def _counted(num: int) -> str:
    return f"{num} or more" if num >= _COUNTED else str(num)
