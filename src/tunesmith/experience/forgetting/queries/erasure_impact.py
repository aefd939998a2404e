"""Which datasets and adapters contain an experience, and which other experiences may repeat what was said in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tunesmith.datasets.example import Split
from tunesmith.datasets.tables import members
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.forgetting.queries import runs as forgotten_runs
from tunesmith.experience.forgetting.rules import tombstone_key
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.tables import experiences as experiences_table
from tunesmith.models.rules import AdapterState, version_name
from tunesmith.models.tables import adapters
from tunesmith.runs.tables import runs
from tunesmith.store.database import Tx

_COLUMNS = {"session", "source", "natural_key"}
_MAX_AT_ONCE = 500  # parameters of one statement


@dataclass(frozen=True)
class AffectedDataset:
    """A dataset that holds some of them."""

    id: str
    splits: dict[str, int]
    """How many examples of each split were made from them; empty: they are in quarantine.jsonl only."""
    runs: tuple[str, ...]
    """Unfinished runs that read it: rewriting it waits for them."""
    learning: tuple[str, ...]
    """Unfinished runs that learn from some of them: forgetting ends them."""


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


@dataclass(frozen=True)
class Brief:
    """Of an experience, what a preview needs."""

    id: str
    profile: str
    state: ExperienceState
    session: str | None
    dataset_id: str | None


def brief(tx: Tx, ids: Sequence[str]) -> list[Brief]:
    """These experiences, forgotten ones too."""
    table, found = experiences_table, []
    columns = (table.c.id, table.c.profile, table.c.state, table.c.session, table.c.dataset_id)
    for some in _parts(ids):
        for row in tx.all(sa.select(*columns).where(table.c.id.in_(some))):
            found.append(Brief(**{**row, "state": ExperienceState(row["state"])}))
    return found


def datasets_with(tx: Tx, found: Sequence[Brief]) -> list[AffectedDataset]:
    """Every dataset that holds text of these."""
    splits: dict[str, Counter[str]] = {each.dataset_id: Counter() for each in found if each.dataset_id is not None}
    for some in _parts([each.id for each in found]):
        for dataset_id in erasures.left_out_of(tx, some):
            splits.setdefault(dataset_id, Counter())
        query = sa.select(members.c.dataset_id, members.c.split, sa.func.count()).where(
            members.c.experience_id.in_(some)
        )
        for dataset_id, split, num in tx.conn.execute(query.group_by(members.c.dataset_id, members.c.split)):
            splits.setdefault(dataset_id, Counter())[split] += num
    return [_holding(tx, dataset_id, dict(held)) for dataset_id, held in sorted(splits.items())]


def _holding(tx: Tx, dataset_id: str, splits: dict[str, int]) -> AffectedDataset:
    reading = erasures.readers(tx, dataset_id, judges=Split.HELDOUT.value in splits)
    is_learnt = not {split.value for split in forgotten_runs.LEARNT}.isdisjoint(splits)
    ending = forgotten_runs.learning(tx, dataset_id) if is_learnt else []
    return AffectedDataset(dataset_id, splits, tuple(reading), tuple(ending))


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[first : first + _MAX_AT_ONCE] for first in range(0, len(ids), _MAX_AT_ONCE)]


def adapters_with(tx: Tx, held: Sequence[AffectedDataset]) -> list[HoldingAdapter]:
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


def num_going_on(tx: Tx, found: Sequence[Brief]) -> int:
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
