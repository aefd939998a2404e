"""The inbox: everything that waits for a person, each with the command that settles it. Quick, however much waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tunesmith.client.session import Session
from tunesmith.domain.adapter import AdapterState
from tunesmith.domain.classification import screens_of
from tunesmith.domain.run import RunState
from tunesmith.stages import forget, kept_aside
from tunesmith.stages.review import REJECTED_RUNS
from tunesmith.store import adapters, datasets, deployments, erasures, experiences, queue, reviews, runs
from tunesmith.store.adapters import Adapter
from tunesmith.store.database import Tx

_COUNTED = 10_000  # more are "10000 or more"
_LOOKED_AT = 1_000  # of the newest suspects, to tell why they wait
_NAMED = 3
_DATASETS = 100


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
    """Parked tasks: how the last attempt ended, with the last words of its program."""
    num: int = 1
    """How many things wait behind this one item, counted up to 10,000."""
    newest: tuple[str, ...] = ()
    """The newest of them, where they are many."""


def read_inbox(session: Session) -> list[InboxItem]:
    """Everything that waits, the oldest first."""
    with session.database.read() as tx:
        items = [*_held(tx), *_parked(tx), *_troubled(tx), *_suspects(tx), *_rejected(tx), *_erasures(tx)]
        items += [*_kept_aside(tx, session.workspace.data_dir), *_no_room(tx, session.no_room)]
    return sorted(items, key=lambda item: item.since)


def _kept_aside(tx: Tx, data_dir: Path) -> Iterator[InboxItem]:
    """Of the newest datasets, those with suspect rows that nobody has decided about."""
    for dataset in datasets.listing(tx, limit=_DATASETS):
        num = kept_aside.num_undecided(tx, dataset.id, data_dir / dataset.path)
        if num:
            yield InboxItem(
                "rows kept aside",
                dataset.id,
                dataset.profile,
                dataset.created_at,
                f"{num} suspect {'row of the dataset was' if num == 1 else 'rows of the dataset were'} kept aside",
                f"`dataset quarantine {dataset.id}`, then `dataset release`, or the same with `--leave`",
                num=num,
            )


def _held(tx: Tx) -> Iterator[InboxItem]:
    for run in runs.listing(tx, states=frozenset({RunState.HELD}), limit=1000):
        what_to_do = _what_to_do(adapters.of_run(tx, run.id))
        yield InboxItem("held run", run.id, run.profile, run.moved_at, run.reason, what_to_do)


def _parked(tx: Tx) -> Iterator[InboxItem]:
    for task in queue.parked(tx):
        last = queue.last_attempt(tx, task.id)
        yield InboxItem(
            f"parked {task.kind} task", task.run_id or task.id, task.profile or "", task.created_at, task.reason,
            "read `run logs`, repair, then `run retry`", last.error or "",
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
        )  # fmt: skip


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


def _what_to_do(adapter: Adapter | None) -> str:
    if adapter is None:
        return "`run cancel`"
    if adapter.state is AdapterState.CANDIDATE:
        return f"`adapter approve {adapter.name}`, or `evaluate` or `reject` it"
    return f"it is {adapter.state} and cannot go live again: `adapter reject {adapter.name}`, then `run retry`"
