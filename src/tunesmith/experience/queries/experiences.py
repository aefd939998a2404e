"""Experiences: captured interactions and the reservation a dataset holds on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunesmith.core.errors import Conflict, NotFound, Refused, quoted
from tunesmith.core.ids import next_id
from tunesmith.experience.forgetting.rules import tombstone_key
from tunesmith.experience.queries import assessments
from tunesmith.experience.rules.classes import UNJUDGED, Assessment
from tunesmith.experience.rules.experience import (
    EXPERIENCE,
    REJECTIONS_BEFORE_REVIEW,
    Context,
    ExperienceClass,
    ExperienceState,
)
from tunesmith.experience.tables import assessments as assessments_table
from tunesmith.experience.tables import experiences
from tunesmith.runs.rules.run import DataEffect
from tunesmith.store import events
from tunesmith.store.compiled_statements import CompiledStatement
from tunesmith.store.database import Tx
from tunesmith.store.lookup import find_one, get_one, move_guarded

_MAX_AT_ONCE = 1000  # parameters of one statement


def _add_once(insert: Any) -> CompiledStatement:
    """An insert that does nothing where the key is there; it gives a row back where it was not."""
    unset = {"seq", "dataset_id", "run_id", "adapter_id"}
    values = {column.name: sa.bindparam(column.name, type_=column.type) for column in experiences.c}
    named = {name: value for name, value in values.items() if name not in unset}
    return CompiledStatement(insert.values(named).on_conflict_do_nothing().returning(experiences.c.id))


_TOMBSTONE = CompiledStatement(
    sa.select(experiences.c.id).where(
        experiences.c.profile == sa.bindparam("profile"), experiences.c.natural_key == sa.bindparam("natural_key")
    )
)
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
    key_label: str | None
    """The API key that `tunesmith serve` gave this answer to; None: it was not served over HTTP."""


def add(
    tx: Tx,
    profile: str,
    natural_key: str,
    messages: list[dict[str, Any]],
    *,
    actor: str,
    context: Context = Context(),
    assessment: Assessment = UNJUDGED,
    key_label: str | None = None,
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
        key_label=key_label,
        **{**vars(context), "captured_at": context.captured_at or tx.now},
    )
    if is_new is None:
        return _known(tx, profile, natural_key, messages), False
    if (forgotten := _tombstone(tx, profile, natural_key)) is not None:
        tx.run(experiences.delete().where(experiences.c.id == experience_id))
        return forgotten, False
    assessments.add(tx, experience_id, profile, assessment)
    moved = (None, ExperienceState.COLLECTED)
    detail = {"class": assessment.class_name, "reasons": list(assessment.reasons)}
    events.record(tx, "experience", experience_id, "captured", actor=actor, moved=moved, detail=detail)
    return experience_id, True


def _known(tx: Tx, profile: str, natural_key: str, messages: list[dict[str, Any]]) -> str:
    """The experience that has this key; the same key for another conversation is a mistake of the caller."""
    mine = (experiences.c.profile == profile, experiences.c.natural_key == natural_key)
    row = tx.first(sa.select(experiences.c.id, experiences.c.messages, experiences.c.state).where(*mine))
    if row is None and (forgotten := _tombstone(tx, profile, natural_key)) is not None:
        return forgotten  # since a moment ago
    assert row is not None
    if row["messages"] != messages and row["state"] != ExperienceState.FORGOTTEN:
        raise Conflict(f"experience {row['id']} has this key and holds another conversation; give this one its own key")
    return str(row["id"])


def _tombstone(tx: Tx, profile: str, natural_key: str) -> str | None:
    """The forgotten experience that had this key; looked for after the insert, which waits for whoever forgets it."""
    kept = tombstone_key(natural_key)
    if kept == natural_key:
        return None  # a hash is kept as it is, so the database itself has refused it
    found = _TOMBSTONE.first(tx, profile=profile, natural_key=kept)
    return None if found is None else str(found["id"])


def num_forgotten(tx: Tx, ids: Sequence[str]) -> int:
    """How many of these, each as often as it is named, are tombstones."""
    table = experiences
    query = sa.select(table.c.id).where(table.c.id.in_(set(ids)), table.c.state == ExperienceState.FORGOTTEN)
    found = set(tx.conn.execute(query).scalars()) if ids else set()
    return sum(each in found for each in ids)


class NotReservable(Refused):
    """It cannot be reserved, or not any more: another dataset has it, or a person must look first. Choose again."""


def reserve(tx: Tx, ids: Sequence[str], dataset_id: str, *, actor: str) -> None:
    """Reserve all of them for a dataset, or none. A few statements, however many they are."""
    for some in _parts(ids):
        _refuse_what_cannot_be_reserved(tx, some)
        chosen = experiences.c.id.in_(some)
        moved = _move_all(
            tx, chosen, (ExperienceState.COLLECTED, ExperienceState.RESERVED), actor=actor,
            reason=f"dataset {dataset_id}", dataset_id=dataset_id,
        )  # fmt: skip
        if moved != len(some):
            raise NotReservable("some of the experiences moved on meanwhile; choose again")


def _parts(ids: Sequence[str]) -> list[list[str]]:
    """In one order for everybody, so that two who want the same rows wait for each other and never in a circle."""
    ordered = sorted(set(ids))
    return [ordered[first : first + _MAX_AT_ONCE] for first in range(0, len(ordered), _MAX_AT_ONCE)]


def _refuse_what_cannot_be_reserved(tx: Tx, ids: Sequence[str]) -> None:
    """Locks the rows; raises for the first that is in nobody's reach, or waits for a person."""
    judged = assessments_table
    query = (
        sa.select(experiences.c.id, experiences.c.state, experiences.c.in_review, judged.c.class_name)
        .join(judged, judged.c.experience_id == experiences.c.id)
        .where(experiences.c.id.in_(ids))
        .order_by(experiences.c.id)
    )
    rows = tx.all(query.with_for_update(of=experiences) if tx.is_postgres else query)
    if len(rows) < len(ids):
        raise NotFound.named("experience", sorted(set(ids) - {row["id"] for row in rows})[0])
    for row in rows:
        _refuse_suspect(row)
        if row["state"] != ExperienceState.COLLECTED:
            raise NotReservable(f"experience {row['id']} is {row['state']}; only a collected one can be reserved")


def refuse_suspects(tx: Tx, ids: Sequence[str]) -> None:
    """Raises for the first that waits for a person, or is quarantined; what was forgotten is in no file any more."""
    judged = assessments_table
    for some in _parts(ids):
        query = (
            sa.select(experiences.c.id, experiences.c.in_review, judged.c.class_name)
            .join(judged, judged.c.experience_id == experiences.c.id)
            .where(experiences.c.id.in_(some), experiences.c.state != ExperienceState.FORGOTTEN)
            .order_by(experiences.c.id)
        )
        for row in tx.all(query):
            _refuse_suspect(row)


def _refuse_suspect(row: Mapping[Any, Any]) -> None:
    if row["in_review"]:
        raise NotReservable(f"experience {row['id']} waits for a review; it cannot be reserved")
    if row["class_name"] == ExperienceClass.QUARANTINED:
        raise NotReservable(f"experience {row['id']} is quarantined; it cannot be reserved")


def settle(
    tx: Tx, dataset_id: str, effect: DataEffect, *, actor: str, run_id: str, adapter_id: str | None, last: bool
) -> None:
    """Apply the end of a run to the data of its dataset; `last` says that no other unfinished run refers to it."""
    mine = experiences.c.dataset_id == dataset_id
    _lock_all(tx, mine)
    if effect is DataEffect.RELEASE_AND_COUNT:
        _count_rejections(tx, mine, actor)
    if effect is DataEffect.CONSUME:
        _move_all(
            tx, mine, (ExperienceState.RESERVED, ExperienceState.CONSUMED), actor=actor, reason=f"run {run_id}",
            dataset_id=dataset_id, run_id=run_id, adapter_id=adapter_id,
        )  # fmt: skip
    elif last:
        release(tx, dataset_id, actor=actor, reason=f"released by run {run_id}")


def release(tx: Tx, dataset_id: str, *, actor: str, reason: str) -> int:
    """End the reservation of a dataset: what it has not consumed is free again. Says how many that are."""
    mine = experiences.c.dataset_id == dataset_id
    _lock_all(tx, mine)
    return _move_all(tx, mine, (ExperienceState.RESERVED, ExperienceState.COLLECTED), actor=actor, reason=reason)


def unconsume(tx: Tx, adapter_id: str, *, actor: str, reason: str, kept: Collection[str] = ()) -> None:
    """An adapter was rolled back after it was deployed: what it consumed may be learnt again.

    What came with one of the datasets `kept` is reserved for it: other runs on it go on.
    """
    learnt = sa.and_(experiences.c.adapter_id == adapter_id, experiences.c.state == ExperienceState.CONSUMED)
    _lock_all(tx, learnt)
    _count_rejections(tx, learnt, actor)
    mine = {dataset_id: _ids(tx, sa.and_(learnt, experiences.c.dataset_id == dataset_id)) for dataset_id in kept}
    _move_all(tx, learnt, (ExperienceState.CONSUMED, ExperienceState.COLLECTED), actor=actor, reason=reason)
    for dataset_id, ids in mine.items():
        reserve_free(tx, ids, dataset_id, actor=actor, why="which other runs have learnt from, or do now")


def reserve_free(tx: Tx, ids: Sequence[str], dataset_id: str, *, actor: str, why: str) -> None:
    """Those of them that are free, also suspects: a version has learnt them already. The others stay where they are."""
    for some in _parts(ids):
        chosen = experiences.c.id.in_(some)
        _lock_all(tx, chosen)
        _move_all(
            tx, chosen, (ExperienceState.COLLECTED, ExperienceState.RESERVED), actor=actor,
            reason=f"dataset {dataset_id}, {why}", dataset_id=dataset_id,
        )  # fmt: skip


def _ids(tx: Tx, chosen: Any) -> list[str]:
    return [str(each) for each in tx.conn.execute(sa.select(experiences.c.id).where(chosen)).scalars()]


def lock_many(tx: Tx, ids: Sequence[str]) -> None:
    """What others want to say about them, or do with them, waits until this transaction has ended."""
    for some in _parts(ids):
        _lock_all(tx, experiences.c.id.in_(some))


def _lock_all(tx: Tx, chosen: Any) -> None:
    """What others want to do with these rows waits until this transaction has ended."""
    if tx.is_postgres:
        tx.all(sa.select(experiences.c.id).where(chosen).order_by(experiences.c.id).with_for_update())


def _count_rejections(tx: Tx, chosen: Any, actor: str) -> None:
    counted = experiences.c.num_rejections + 1
    in_review = sa.or_(experiences.c.in_review, counted >= REJECTIONS_BEFORE_REVIEW)
    tx.run(experiences.update().where(chosen).values(num_rejections=counted, in_review=in_review))
    just_now = sa.and_(chosen, experiences.c.num_rejections == REJECTIONS_BEFORE_REVIEW)
    reason = f"was in {REJECTIONS_BEFORE_REVIEW} rejected runs"
    events.record_all(tx, "experience", experiences.c.id, just_now, "sent_to_review", actor=actor, reason=reason)


def _move_all(
    tx: Tx,
    chosen: Any,
    moved: tuple[ExperienceState, ExperienceState],
    *,
    actor: str,
    reason: str,
    **owners: str | None,
) -> int:
    """The setter of many: table, guard on the old state, an event each. The caller has locked the rows."""
    EXPERIENCE.check("of a dataset", *moved)
    free = {"dataset_id": None, "run_id": None, "adapter_id": None}
    here = sa.and_(chosen, experiences.c.state == moved[0])
    events.record_all(tx, "experience", experiences.c.id, here, "moved", actor=actor, moved=moved, reason=reason)
    return tx.run(experiences.update().where(here).values(state=moved[1], **{**free, **owners}))


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
    """The setter of one experience's state and reservation."""
    old = get(tx, experience_id).state
    EXPERIENCE.check(experience_id, old, new)
    owners = {"dataset_id": dataset_id, "run_id": run_id, "adapter_id": adapter_id}
    move_guarded(tx, experiences, experience_id, old, state=new, **owners)
    events.record(tx, "experience", experience_id, "moved", actor=actor, moved=(old, new), reason=reason)


def get(tx: Tx, experience_id: str) -> Experience:
    return _experience(get_one(tx, experiences, experience_id))


def find(tx: Tx, text: str) -> Experience:
    """By its id, the beginning of it, or PROFILE:KEY with the key it was captured under."""
    profile, colon, key = text.partition(":")
    if not colon:
        return _experience(find_one(tx, experiences, "xp", text))
    row = tx.first(sa.select(experiences).where(experiences.c.profile == profile, experiences.c.natural_key == key))
    if row is None and (forgotten := _tombstone(tx, profile, key)) is not None:
        return get(tx, forgotten)
    if row is None:
        raise NotFound(
            f"profile {quoted(profile)} has no experience with the key {quoted(key)}; an answer just given is stored "
            "a moment later, by whoever gave it: the queue of an application (`client.capture.flush()` there waits for "
            "it) or `tunesmith serve`. `tunesmith experience list` shows what is there"
        )
    return _experience(row)


def lock(tx: Tx, experience_id: str) -> Experience:
    """The experience; what others want to say about it waits until this transaction has ended."""
    query = sa.select(experiences).where(experiences.c.id == experience_id)
    row = tx.first(query.with_for_update() if tx.is_postgres else query)
    if row is None:
        raise NotFound.named("experience", experience_id)
    return _experience(row)


def last_before(tx: Tx, here: Experience) -> Experience | None:
    """The experience before this one in its session; callers name sessions, so only one of the same API key."""
    table = experiences
    mine = (table.c.profile == here.profile, table.c.session == here.session, table.c.seq < here.seq)
    asked_by = table.c.key_label.is_(None) if here.key_label is None else table.c.key_label == here.key_label
    row = tx.first(sa.select(experiences).where(*mine, asked_by).order_by(experiences.c.seq.desc()).limit(1))
    return None if row is None else _experience(row)


def listing(tx: Tx, wanted: Mapping[str, str], limit: int) -> list[tuple[Experience, Assessment]]:
    """The newest first, with what is thought of them; `wanted` are exact values of columns of either."""
    judged = assessments_table
    query = sa.select(experiences, judged).join(judged, judged.c.experience_id == experiences.c.id)
    by_class = "class_name" in wanted
    if by_class:
        query = query.where(experiences.c.state != ExperienceState.FORGOTTEN)  # a tombstone has no class
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


def _experience(row: Mapping[Any, Any]) -> Experience:
    fields: dict[str, Any] = dict(row)
    return Experience(**{**fields, "state": ExperienceState(row["state"])})
