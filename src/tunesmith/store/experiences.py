"""Experiences: captured interactions and the reservation a dataset holds on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunesmith.domain.classification import UNJUDGED, Assessment
from tunesmith.domain.experience import (
    EXPERIENCE,
    REJECTIONS_BEFORE_REVIEW,
    Context,
    ExperienceClass,
    ExperienceState,
)
from tunesmith.domain.run import DataEffect
from tunesmith.errors import Conflict, NotFound, Refused
from tunesmith.ids import next_id
from tunesmith.store import assessments, events
from tunesmith.store.database import Tx
from tunesmith.store.prepared import Prepared
from tunesmith.store.runs import find_one
from tunesmith.store.tables import assessments as assessments_table
from tunesmith.store.tables import experiences


def _add_once(insert: Any) -> Prepared:
    """An insert that does nothing where the key is there; it gives a row back where it was not."""
    unset = {"seq", "dataset_id", "run_id", "adapter_id"}
    values = {column.name: sa.bindparam(column.name, type_=column.type) for column in experiences.c}
    named = {name: value for name, value in values.items() if name not in unset}
    return Prepared(insert.values(named).on_conflict_do_nothing().returning(experiences.c.id))


_ADD_ONCE = {
    "sqlite": _add_once(sqlite.insert(experiences)),
    "postgresql": _add_once(postgresql.insert(experiences)),
}


@dataclass(frozen=True)
class Experience:
    seq: int
    id: str
    profile: str
    natural_key: str
    messages: list[dict[str, Any]]
    state: ExperienceState
    dataset_id: str | None
    run_id: str | None
    adapter_id: str | None
    num_rejections: int
    in_review: bool
    created_at: datetime
    source: str | None
    session: str | None
    served_by: str | None
    template: str | None
    task_type: str | None
    reference: str | None
    captured_at: datetime | None


def add(
    tx: Tx,
    profile: str,
    natural_key: str,
    messages: list[dict[str, Any]],
    *,
    actor: str,
    context: Context = Context(),
    assessment: Assessment = UNJUDGED,
) -> tuple[str, bool]:
    """Store one interaction with what is thought of it; its id, and whether it is new.

    The same natural key again is the same experience, and changes nothing.
    """
    experience_id = next_id("xp")
    is_new = _ADD_ONCE[tx.conn.dialect.name].first(
        tx,
        id=experience_id,
        profile=profile,
        natural_key=natural_key,
        messages=messages,
        state=ExperienceState.COLLECTED,
        num_rejections=0,
        in_review=False,
        created_at=tx.now,
        **{**vars(context), "captured_at": context.captured_at or tx.now},
    )
    if is_new is None:
        return _known(tx, profile, natural_key, messages), False
    assessments.add(tx, experience_id, profile, assessment)
    moved = (None, ExperienceState.COLLECTED)
    detail = {"class": assessment.class_name, "reasons": list(assessment.reasons)}
    events.record(tx, "experience", experience_id, "captured", actor=actor, moved=moved, detail=detail)
    return experience_id, True


def _known(tx: Tx, profile: str, natural_key: str, messages: list[dict[str, Any]]) -> str:
    """The experience that has this key; the same key for another conversation is a mistake of the caller."""
    mine = (experiences.c.profile == profile, experiences.c.natural_key == natural_key)
    row = tx.first(sa.select(experiences.c.id, experiences.c.messages, experiences.c.state).where(*mine))
    assert row is not None
    if row["messages"] != messages and row["state"] != ExperienceState.FORGOTTEN:
        raise Conflict(f"experience {row['id']} has this key and holds another conversation; give this one its own key")
    return str(row["id"])


def reserve(tx: Tx, ids: Sequence[str], dataset_id: str, *, actor: str) -> None:
    """Reserve all of them for a dataset, or none."""
    for experience_id in ids:
        if get(tx, experience_id).in_review:
            raise Refused(f"experience {experience_id} waits for a review; it cannot be reserved")
        if assessments.get(tx, experience_id).class_name is ExperienceClass.QUARANTINED:
            raise Refused(f"experience {experience_id} is quarantined; it cannot be reserved")
        move(
            tx,
            experience_id,
            ExperienceState.RESERVED,
            actor=actor,
            reason=f"dataset {dataset_id}",
            dataset_id=dataset_id,
        )


def settle(
    tx: Tx, dataset_id: str, effect: DataEffect, *, actor: str, run_id: str, adapter_id: str | None, last: bool
) -> None:
    """Apply the end of a run to the data of its dataset; `last` says that no other unfinished run refers to it."""
    for experience in of_dataset(tx, dataset_id):
        if effect is DataEffect.CONSUME and experience.state is ExperienceState.RESERVED:
            move(
                tx, experience.id, ExperienceState.CONSUMED, actor=actor, reason=f"run {run_id}",
                dataset_id=dataset_id, run_id=run_id, adapter_id=adapter_id,
            )  # fmt: skip
        if effect is DataEffect.RELEASE_AND_COUNT:
            _count_rejection(tx, experience, actor)
        if effect is not DataEffect.CONSUME and last and experience.state is ExperienceState.RESERVED:
            move(tx, experience.id, ExperienceState.COLLECTED, actor=actor, reason=f"released by run {run_id}")


def give_back(tx: Tx, adapter_id: str, *, actor: str, reason: str) -> None:
    """An adapter was rolled back after it was deployed: what it consumed may be learnt again."""
    query = sa.select(experiences).where(
        experiences.c.adapter_id == adapter_id, experiences.c.state == ExperienceState.CONSUMED
    )
    for row in tx.all(query):
        experience = _experience(row)
        _count_rejection(tx, experience, actor)
        move(tx, experience.id, ExperienceState.COLLECTED, actor=actor, reason=reason)


def _count_rejection(tx: Tx, experience: Experience, actor: str) -> None:
    counted = experiences.c.num_rejections + 1
    in_review = sa.or_(experiences.c.in_review, counted >= REJECTIONS_BEFORE_REVIEW)
    row = tx.first(
        experiences.update()
        .where(experiences.c.id == experience.id)
        .values(num_rejections=counted, in_review=in_review)
        .returning(experiences.c.num_rejections)
    )
    assert row is not None
    if row["num_rejections"] == REJECTIONS_BEFORE_REVIEW:
        reason = f"was in {REJECTIONS_BEFORE_REVIEW} rejected runs"
        events.record(tx, "experience", experience.id, "sent_to_review", actor=actor, reason=reason)


def move(
    tx: Tx,
    experience_id: str,
    new: ExperienceState,
    *,
    actor: str,
    reason: str,
    dataset_id: str | None = None,
    run_id: str | None = None,
    adapter_id: str | None = None,
) -> None:
    """The one setter of an experience's state and reservation."""
    old = get(tx, experience_id).state
    EXPERIENCE.check(experience_id, old, new)
    moved = tx.run(
        experiences.update()
        .where(experiences.c.id == experience_id, experiences.c.state == old)
        .values(state=new, dataset_id=dataset_id, run_id=run_id, adapter_id=adapter_id)
    )
    if moved != 1:
        raise Refused(f"experience {experience_id} moved on meanwhile; look again")
    events.record(tx, "experience", experience_id, "moved", actor=actor, moved=(old, new), reason=reason)


def get(tx: Tx, experience_id: str) -> Experience:
    row = tx.first(sa.select(experiences).where(experiences.c.id == experience_id))
    if row is None:
        raise NotFound.named("experience", experience_id)
    return _experience(row)


def find(tx: Tx, text: str) -> Experience:
    """By its id, or the beginning of it."""
    return _experience(find_one(tx, experiences, "xp", text))


def lock(tx: Tx, experience_id: str) -> Experience:
    """The experience; what others want to say about it waits until this transaction has ended."""
    query = sa.select(experiences).where(experiences.c.id == experience_id)
    row = tx.first(query.with_for_update() if tx.is_postgres else query)
    if row is None:
        raise NotFound.named("experience", experience_id)
    return _experience(row)


def last_of_session(tx: Tx, profile: str, session: str, before: int) -> Experience | None:
    """The experience of a conversation that came last before a place in the order."""
    mine = (experiences.c.profile == profile, experiences.c.session == session, experiences.c.seq < before)
    row = tx.first(sa.select(experiences).where(*mine).order_by(experiences.c.seq.desc()).limit(1))
    return None if row is None else _experience(row)


def listing(tx: Tx, wanted: Mapping[str, str], limit: int) -> list[tuple[Experience, Assessment]]:
    """The newest first, with what is thought of them; `wanted` are exact values of columns of either."""
    judged = assessments_table
    query = sa.select(experiences, judged).join(judged, judged.c.experience_id == experiences.c.id)
    by_class = "class_name" in wanted
    for name, value in wanted.items():
        owner = judged if name == "class_name" or (name == "profile" and by_class) else experiences
        query = query.where(owner.c[name] == value)
    rows = tx.conn.execute(query.order_by((judged if by_class else experiences).c.seq.desc()).limit(limit))
    num = len(experiences.c)
    names = [column.name for column in (*experiences.c, *judged.c)]
    return [
        (
            _experience(dict(zip(names[:num], row[:num], strict=True))),
            assessments.from_row(dict(zip(names[num:], row[num:], strict=True))),
        )
        for row in rows
    ]


def tally(tx: Tx, profile: str | None) -> list[tuple[str, str, str, int]]:
    """How many there are by profile, state and class."""
    judged = assessments_table
    keys = (experiences.c.profile, experiences.c.state, judged.c.class_name)
    query = sa.select(*keys, sa.func.count()).join(judged, judged.c.experience_id == experiences.c.id)
    if profile is not None:
        query = query.where(experiences.c.profile == profile)
    return [(row[0], row[1], row[2], int(row[3])) for row in tx.conn.execute(query.group_by(*keys).order_by(*keys))]


def of_dataset(tx: Tx, dataset_id: str) -> list[Experience]:
    query = sa.select(experiences).where(experiences.c.dataset_id == dataset_id).order_by(experiences.c.seq)
    return [_experience(row) for row in tx.all(query)]


def _experience(row: Mapping[Any, Any]) -> Experience:
    fields: dict[str, Any] = dict(row)
    return Experience(**{**fields, "state": ExperienceState(row["state"])})
