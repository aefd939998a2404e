"""Members: which experiences a dataset was made from, and the life of the reservation it holds on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa

from tunesmith.core.errors import Refused
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.datasets.report import MemberRole
from tunesmith.datasets.tables import datasets as datasets_table
from tunesmith.datasets.tables import members
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.tables import experiences as experiences_table
from tunesmith.models.rules import AdapterState
from tunesmith.models.tables import adapters as adapters_table
from tunesmith.runs.queries import runs
from tunesmith.runs.rules.run import DataEffect, RunState
from tunesmith.runs.tables import runs as runs_table
from tunesmith.runs.tables import workers
from tunesmith.store.database import Tx
from tunesmith.store.events import events


@dataclass(frozen=True)
class Member:
    """One experience in one dataset."""

    dataset_id: str
    experience_id: str
    example_id: str
    group_id: str
    split: Split
    role: MemberRole
    reason: str

    @property
    def is_new(self) -> bool:
        """It was reserved for this dataset; what is replayed stays with the dataset that it was learnt with."""
        return self.role is not MemberRole.REPLAY


def add(tx: Tx, found: Sequence[Member], *, actor: str) -> None:
    """The members of a new dataset, and its reservation of all that are new: all of it or nothing."""
    if not found:
        return
    experiences.lock_many(tx, [member.experience_id for member in found])  # first, and in everybody's order
    new = [member.experience_id for member in found if member.is_new]
    experiences.reserve(tx, new, found[0].dataset_id, actor=actor)
    tx.conn.execute(members.insert(), [vars(member) for member in found])


def of_dataset(tx: Tx, dataset_id: str) -> list[Member]:
    """In the order of the dataset's lines."""
    return _found(tx, members.c.dataset_id == dataset_id)


def of_experience(tx: Tx, experience_id: str) -> list[Member]:
    """Every dataset that it was in, the oldest first."""
    return _found(tx, members.c.experience_id == experience_id)


def _found(tx: Tx, condition: sa.ColumnElement[bool]) -> list[Member]:
    return [
        Member(
            dataset_id=row["dataset_id"],
            experience_id=row["experience_id"],
            example_id=row["example_id"],
            group_id=row["group_id"],
            split=Split(row["split"]),
            role=MemberRole(row["role"]),
            reason=row["reason"],
        )
        for row in tx.all(sa.select(members).where(condition).order_by(members.c.seq))
    ]


def reserve_for_run(tx: Tx, dataset_id: str, *, actor: str) -> None:
    """A run is about to be queued: the dataset's experiences must be its own, or free and reserved again now.

    An earlier run may have released them. What another dataset has by then, or what waits for a person, would be
    trained twice or against a suspicion, so the run is refused.
    """
    free = check_for_run(tx, dataset_id)
    tx.run(datasets_table.update().where(datasets_table.c.id == dataset_id).values(reserved_until=None))
    with _told_of(dataset_id):
        experiences.reserve(tx, free, dataset_id, actor=actor)


def check_for_run(tx: Tx, dataset_id: str) -> list[str]:
    """Raises where a run on the dataset must be refused; which of its experiences are free. Reserves nothing."""
    datasets.lock(tx, dataset_id)
    table = experiences_table
    mine = sa.select(members.c.experience_id).where(
        members.c.dataset_id == dataset_id, members.c.role != MemberRole.REPLAY
    )
    rows = tx.all(sa.select(table.c.id, table.c.state, table.c.dataset_id).where(table.c.id.in_(mine)))
    elsewhere = [row for row in rows if row["dataset_id"] not in (None, dataset_id)]
    if elsewhere:
        raise Refused(
            f"{len(elsewhere)} of the experiences of dataset {dataset_id} are in {elsewhere[0]['dataset_id']} by now; "
            "run on that one, or assemble a new dataset: tunesmith dataset assemble"
        )
    everyone = sa.select(members.c.experience_id).where(members.c.dataset_id == dataset_id)
    with _told_of(dataset_id):
        # also what an earlier run has consumed, or is replayed: a person may have rejected it since
        experiences.refuse_suspects(tx, list(tx.conn.execute(everyone).scalars()))
    return [row["id"] for row in rows if row["state"] == ExperienceState.COLLECTED]


@contextmanager
def _told_of(dataset_id: str) -> Iterator[None]:
    """What is refused of an experience is told of the dataset, with what to do."""
    try:
        yield
    except Refused as error:
        raise Refused(
            f"dataset {dataset_id}: {error.message}; assemble a new one: tunesmith dataset assemble"
        ) from error


def release_unused(tx: Tx, *, actor: str) -> list[str]:
    """Release datasets that no run was submitted on: after a while, or at once where their worker is gone; which ones.

    A worker assembles only for a round that it queues right away. If it was killed in between, nobody else will.
    """
    dataset_id, until = datasets_table.c.id, datasets_table.c.reserved_until
    of_gone_worker = sa.exists().where(
        events.c.entity == "dataset",
        events.c.entity_id == dataset_id,
        events.c.action == "assembled",
        events.c.actor.startswith("wk-"),
        events.c.actor.not_in(sa.select(workers.c.id)),
    )
    due = sa.select(dataset_id).where(until.is_not(None), sa.or_(until <= tx.now, of_gone_worker))
    in_use = sa.exists().where(runs_table.c.dataset_id == dataset_id, runs_table.c.finished_at.is_(None))
    found = [str(row["id"]) for row in tx.all(due.where(~in_use).order_by(dataset_id))]
    for each in found:
        release_reservation(tx, each, actor=actor, reason="no run was submitted on its dataset in time")
    return found


def release_reservation(tx: Tx, dataset_id: str, *, actor: str, reason: str) -> None:
    """End the reservation of a dataset that no run uses."""
    datasets.lock(tx, dataset_id)
    if runs.unfinished_on_dataset(tx, dataset_id):
        return  # one was submitted a moment ago
    tx.run(datasets_table.update().where(datasets_table.c.id == dataset_id).values(reserved_until=None))
    experiences.release(tx, dataset_id, actor=actor, reason=reason)


def unconsume(tx: Tx, adapter_id: str, *, actor: str, reason: str) -> None:
    """An adapter was rolled back: what it had consumed is free again, unless another run on the dataset has a claim.

    One that is unfinished keeps the reservation; one that was deployed or completed too has learnt it as well.
    """
    table, mine = experiences_table, experiences_table.c.adapter_id == adapter_id
    learnt = sa.select(table.c.dataset_id).where(mine, table.c.state == ExperienceState.CONSUMED)
    names = sorted(tx.conn.execute(learnt.distinct()).scalars())
    for dataset_id in names:
        datasets.lock(tx, dataset_id)  # before its experiences, as the end of a run does
    heirs = {dataset_id: _heir(tx, dataset_id, adapter_id) for dataset_id in names}
    kept = [name for name in names if heirs[name] is not None or runs.unfinished_on_dataset(tx, name)]
    experiences.unconsume(tx, adapter_id, actor=actor, reason=reason, kept=kept)
    for dataset_id, heir in heirs.items():
        if heir is not None:
            run_id, other_id = heir
            experiences.settle(
                tx, dataset_id, DataEffect.CONSUME, actor=actor, run_id=run_id, adapter_id=other_id, last=False
            )


def learn_again(tx: Tx, dataset_id: str, *, actor: str, run_id: str, adapter_id: str) -> None:
    """A version went live again: what it had learnt is consumed again, except what others have by now.

    The caller has locked the dataset. What is held out was not trained, and belongs to the dataset all the same.
    """
    mine = [member.experience_id for member in of_dataset(tx, dataset_id) if member.is_new]
    experiences.reserve_free(tx, mine, dataset_id, actor=actor, why="whose version is live again")
    experiences.settle(
        tx, dataset_id, DataEffect.CONSUME, actor=actor, run_id=run_id, adapter_id=adapter_id, last=False
    )


def _heir(tx: Tx, dataset_id: str, but: str) -> tuple[str, str] | None:
    """The first other run that has learnt from the dataset, and its adapter, which is in service or may come to be.

    Also a run that has brought an adapter of the dataset live again: it has learnt nothing, but its adapter had.
    """
    made, able = adapters_table, (AdapterState.CANDIDATE, AdapterState.LIVE, AdapterState.SUPERSEDED)
    query = (
        sa.select(runs_table.c.id, runs_table.c.spec, made.c.id, made.c.run_id)
        .join(made, made.c.run_id.in_([runs_table.c.id, runs_table.c.parent_id]))
        .where(
            runs_table.c.dataset_id == dataset_id,
            runs_table.c.state.in_([RunState.DEPLOYED, RunState.COMPLETED]),
            made.c.state.in_(able),
            made.c.id != but,
        )
        .order_by(runs_table.c.seq)
    )
    for run_id, spec, adapter_id, made_by in tx.conn.execute(query):
        if made_by == run_id or (spec.get("deploys") or {}).get("id") == adapter_id:
            return str(run_id), str(adapter_id)
    return None
