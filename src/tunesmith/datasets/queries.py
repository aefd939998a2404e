"""Datasets and the held-out pool that accumulates from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tunesmith.datasets.example import Split
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.tables import datasets, heldout_cases, members
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.tables import runs
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.lookup import find_one, get_one

UNUSED_RESERVATION = timedelta(hours=24)
_MAX_AT_ONCE = 500  # parameters of one statement
_PROVEN = (RunState.DEPLOYED, RunState.COMPLETED, RunState.WATCHING)


@dataclass(frozen=True)
class HeldoutCase:
    id: str
    """The hash of its normalised prompt: one reference answer per prompt, the first one."""
    messages: list[dict[str, Any]]
    is_established: bool = False
    """It came with an earlier dataset that proved itself in a deployed or completed run."""


def add(
    tx: Tx, dataset_id: str, profile: str, *, path: str, fingerprint: str, kind: str, counts: dict[str, int], actor: str
) -> Dataset:
    tx.run(
        datasets.insert().values(
            id=dataset_id,
            profile=profile,
            path=path,
            fingerprint=fingerprint,
            kind=kind,
            counts=counts,
            created_at=tx.now,
            reserved_until=tx.now + UNUSED_RESERVATION,
        )
    )
    events.record(tx, "dataset", dataset_id, "prepared", actor=actor, detail={"fingerprint": fingerprint, **counts})
    return get(tx, dataset_id)


def get(tx: Tx, dataset_id: str) -> Dataset:
    return _dataset(get_one(tx, datasets, dataset_id, hint="`tunesmith dataset list` shows them"))


def lock(tx: Tx, dataset_id: str) -> None:
    """Ends of runs on one dataset happen one after the other: the last one gives its reservation back."""
    if tx.is_postgres:
        tx.first(sa.select(datasets.c.id).where(datasets.c.id == dataset_id).with_for_update())


def find(tx: Tx, text: str) -> Dataset:
    return _dataset(find_one(tx, datasets, "ds", text))


def of_ids(tx: Tx, ids: sa.Select[Any]) -> list[Dataset]:
    """The datasets that a query names, the oldest first."""
    return [_dataset(row) for row in tx.all(sa.select(datasets).where(datasets.c.id.in_(ids)).order_by(datasets.c.seq))]


def same_content(tx: Tx, profile: str, fingerprint: str) -> Dataset | None:
    """A dataset of this profile that holds exactly these examples."""
    query = sa.select(datasets).where(datasets.c.profile == profile, datasets.c.fingerprint == fingerprint)
    row = tx.first(query)
    return None if row is None else _dataset(row)


def is_known_path(tx: Tx, path: str) -> bool:
    """Whether a folder, relative to the workspace's data folder, is that of a dataset."""
    return tx.first(sa.select(datasets.c.id).where(datasets.c.path == path)) is not None


def add_cases(tx: Tx, profile: str, dataset_id: str, cases: Sequence[HeldoutCase]) -> None:
    """Keep the held-out cases of a new dataset; `pool` decides which of them judge what."""
    common = {"profile": profile, "dataset_id": dataset_id, "added_at": tx.now}
    rows = [{**common, "case_id": case.id, "messages": case.messages} for case in {c.id: c for c in cases}.values()]
    if rows:
        tx.conn.execute(heldout_cases.insert(), rows)


def pool(tx: Tx, profile: str, dataset_id: str, limit: int) -> list[HeldoutCase]:
    """The cases that a run on this dataset is judged on: its own, and those of datasets that proved themselves.

    Cases of data that was never deployed stay out: a poisoned file must not become the yardstick of later rounds.
    Where a prompt came twice, the proven answer counts, and of those the first. Over the limit, cases are spread
    evenly over the order they came in, so that old and new both stay represented.
    """
    proven = sa.select(runs.c.dataset_id).where(runs.c.profile == profile, runs.c.state.in_(_PROVEN))
    own = heldout_cases.c.dataset_id == dataset_id
    rows = tx.conn.execute(
        sa.select(heldout_cases.c.seq, heldout_cases.c.case_id, heldout_cases.c.dataset_id)
        .where(heldout_cases.c.profile == profile, sa.or_(own, heldout_cases.c.dataset_id.in_(proven)))
        .order_by(heldout_cases.c.seq)
    )
    by_prompt: dict[str, tuple[int, bool]] = {}
    for seq, case_id, owner in rows:
        is_established = owner != dataset_id
        known = by_prompt.get(case_id)
        if known is None or (is_established and not known[1]):
            by_prompt[case_id] = (seq, is_established)
    found = list(by_prompt.items())
    if len(found) > limit:
        found = [found[index * len(found) // limit] for index in range(limit)]
    messages = _messages(tx, [seq for _, (seq, _) in found])
    return [HeldoutCase(case_id, messages[seq], is_established) for case_id, (seq, is_established) in found]


def has_learnt_from_files(tx: Tx, profile: str) -> bool:
    """Whether a version that went live was trained on a dataset that no experience is in: one prepared from files."""
    is_assembled = sa.exists().where(members.c.dataset_id == runs.c.dataset_id)
    went_live = (runs.c.profile == profile, runs.c.state.in_([RunState.DEPLOYED, RunState.WATCHING]))
    return tx.first(sa.select(runs.c.id).where(*went_live, ~is_assembled).limit(1)) is not None


def _messages(tx: Tx, seqs: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """The texts of these cases only: over the years a pool holds far more than one evaluation looks at."""
    found: dict[int, list[dict[str, Any]]] = {}
    for first in range(0, len(seqs), _MAX_AT_ONCE):
        some = heldout_cases.c.seq.in_(seqs[first : first + _MAX_AT_ONCE])
        rows = tx.conn.execute(sa.select(heldout_cases.c.seq, heldout_cases.c.messages).where(some))
        found.update((seq, messages) for seq, messages in rows)
    return found


def _dataset(row: sa.RowMapping) -> Dataset:
    return Dataset(**{name: value for name, value in row.items() if name != "seq"})


def groups_of(tx: Tx, dataset_id: str) -> list[tuple[str, Split]]:
    """The groups of prompts that its experiences brought, with their split."""
    query = sa.select(members.c.group_id, members.c.split).where(members.c.dataset_id == dataset_id).distinct()
    return [(str(group), Split(split)) for group, split in tx.conn.execute(query)]
