"""Which datasets and adapters contain an experience, and which other experiences may repeat what was said in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tunesmith.domain.adapter import AdapterState, version_name
from tunesmith.domain.erasure import tombstone_key
from tunesmith.domain.example import Split
from tunesmith.store import erasures, members
from tunesmith.store.database import Tx
from tunesmith.store.experiences import Experience
from tunesmith.store.tables import adapters, runs
from tunesmith.store.tables import experiences as experiences_table

_COLUMNS = {"session", "source", "natural_key"}


@dataclass(frozen=True)
class HoldingDataset:
    """A dataset that holds some of them."""

    id: str
    splits: dict[str, int]
    """How many examples of each split were made from them; empty: they were only kept aside."""
    runs: tuple[str, ...]
    """Unfinished runs that read it: rewriting it waits for them."""


@dataclass(frozen=True)
class HoldingAdapter:
    """An adapter in whose making some of them had a part."""

    id: str
    name: str
    state: str
    contains: bool
    """Whether it learnt from them; otherwise it was only judged on them."""
    how: str
    what_to_do: str


def matching(tx: Tx, profile: str, column: str, value: str) -> list[str]:
    """The experiences of a profile whose session, source or natural key is this, oldest first."""
    assert column in _COLUMNS, column
    table = experiences_table
    values = [value, tombstone_key(value)] if column == "natural_key" else [value]
    query = sa.select(table.c.id).where(table.c.profile == profile, table.c[column].in_(values)).order_by(table.c.seq)
    return [row["id"] for row in tx.all(query)]


def datasets_with(tx: Tx, found: Sequence[Experience]) -> list[HoldingDataset]:
    """Every dataset that holds text of these."""
    splits: dict[str, dict[str, int]] = {}
    for experience in found:
        for dataset_id in erasures.holders(tx, experience):
            splits.setdefault(dataset_id, {})
        for member in members.of_experience(tx, experience.id):
            counted = splits.setdefault(member.dataset_id, {})
            counted[member.split.value] = counted.get(member.split.value, 0) + 1
    return [
        HoldingDataset(each, held, tuple(erasures.readers(tx, each, judges=Split.HELDOUT.value in held)))
        for each, held in sorted(splits.items())
    ]


def adapters_with(tx: Tx, held: Sequence[HoldingDataset]) -> list[HoldingAdapter]:
    """The adapters trained on these datasets, and those that start from one that learnt from them."""
    by_id = {dataset.id: dataset for dataset in held}
    if not by_id:
        return []
    profiles = sa.select(runs.c.profile).where(runs.c.dataset_id.in_(sorted(by_id)))
    query = (
        sa.select(adapters, runs.c.dataset_id, runs.c.spec)
        .join(runs, runs.c.id == adapters.c.run_id)
        .where(adapters.c.profile.in_(profiles))
        .order_by(adapters.c.profile, adapters.c.version)
    )
    found: dict[str, HoldingAdapter] = {}
    for row in tx.all(query):
        dataset, start = by_id.get(row["dataset_id"]), (row["spec"].get("start") or {}).get("id")
        parent = found.get(str(start))
        learnt = dataset is not None and bool({"train", "validation"} & dataset.splits.keys())
        if learnt and dataset is not None:
            how, contains = f"trained on dataset {dataset.id}", True
        elif parent is not None and parent.contains:
            how, contains = f"starts from {parent.name}", True
        elif dataset is not None and "heldout" in dataset.splits:
            how, contains = f"only judged on it, in dataset {dataset.id}", False
        else:
            continue
        name, state = version_name(row["profile"], row["version"]), AdapterState(row["state"])
        advice = _advice(name, state, contains)
        found[row["id"]] = HoldingAdapter(row["id"], name, state.value, contains, how, advice)
    return list(found.values())


def num_going_on(tx: Tx, found: Sequence[Experience]) -> int:
    """How many other experiences belong to the same sessions: later turns repeat what was said before them."""
    ids = {experience.id for experience in found}
    sessions = sorted({(each.profile, each.session) for each in found if each.session is not None})
    others = 0
    for profile, session in sessions:
        rows = matching(tx, profile, "session", str(session))
        others += sum(1 for each in rows if each not in ids)
    return others


def _advice(name: str, state: AdapterState, contains: bool) -> str:
    if not contains:
        return "nothing: it learnt nothing from it"
    if state is AdapterState.REVOKED:
        return "nothing: it is revoked"
    first = "train one without it: `run submit … --start base`, then " if state is AdapterState.LIVE else ""
    return f"{first}`adapter revoke {name}`"
