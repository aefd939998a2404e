"""Experiences: captured interactions and the reservation a dataset holds on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.domain.experience import EXPERIENCE, REJECTIONS_BEFORE_REVIEW, ExperienceState
from tunesmith.domain.run import DataEffect
from tunesmith.errors import NotFound, Refused
from tunesmith.ids import new_id
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.tables import experiences


@dataclass(frozen=True)
class Experience:
    seq: int
    id: str
    profile: str
    natural_key: str
    messages: list[dict[str, str]]
    state: ExperienceState
    dataset_id: str | None
    run_id: str | None
    adapter_id: str | None
    num_rejections: int
    in_review: bool
    created_at: datetime


def add(tx: Tx, profile: str, natural_key: str, messages: list[dict[str, str]], *, actor: str) -> str:
    """Store one interaction; the same natural key again gives the same experience."""
    experience_id = new_id("xp")
    is_new = tx.add_once(
        experiences,
        id=experience_id,
        profile=profile,
        natural_key=natural_key,
        messages=messages,
        state=ExperienceState.COLLECTED,
        num_rejections=0,
        in_review=False,
        created_at=tx.now,
    )
    if not is_new:
        mine = (experiences.c.profile == profile, experiences.c.natural_key == natural_key)
        return str(tx.conn.execute(sa.select(experiences.c.id).where(*mine)).scalar_one())
    moved = (None, ExperienceState.COLLECTED)
    events.record(tx, "experience", experience_id, "captured", actor=actor, moved=moved)
    return experience_id


def reserve(tx: Tx, ids: Sequence[str], dataset_id: str, *, actor: str) -> None:
    """Reserve all of them for a dataset, or none."""
    for experience_id in ids:
        if get(tx, experience_id).in_review:
            raise Refused(f"experience {experience_id} waits for a review; it cannot be reserved")
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


def of_dataset(tx: Tx, dataset_id: str) -> list[Experience]:
    query = sa.select(experiences).where(experiences.c.dataset_id == dataset_id).order_by(experiences.c.seq)
    return [_experience(row) for row in tx.all(query)]


def _experience(row: sa.RowMapping) -> Experience:
    fields: dict[str, Any] = dict(row)
    return Experience(**{**fields, "state": ExperienceState(row["state"])})
