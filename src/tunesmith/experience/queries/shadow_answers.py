"""Shadow answers: what a candidate said to mirrored requests, shown to nobody; who is forgotten goes here too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tunesmith.experience.forgetting.rules import tombstone_key
from tunesmith.experience.rules.shadow import Observed, ShadowOutcome
from tunesmith.experience.tables import experiences, shadow_answers
from tunesmith.models.queries import under_way
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.sections.shadow import ShadowSettings
from tunesmith.runs.queries.runs import get as get_run
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.tables import runs
from tunesmith.store.database import Tx
from tunesmith.store.events import events


@dataclass(frozen=True)
class ShadowedVersion:
    """An adapter version that answers mirrored traffic now."""

    run_id: str
    adapter_id: str
    profile: str
    name: str
    policy: ShadowSettings


@dataclass(frozen=True)
class ShadowAnswer:
    """One mirrored request, as it is stored."""

    run_id: str
    adapter_id: str
    response_id: str
    live_version: str
    outcome: ShadowOutcome
    answer: str | None
    error: str | None
    seconds: float
    live_seconds: float
    flags: tuple[str, ...]
    live_flags: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """How far a shadow has come."""

    num: int
    num_failed: int
    num_timed_out: int
    num_flagged: int
    num_live_flagged: int
    seconds: float | None
    """Mean over what was answered."""
    live_seconds: float | None
    first_at: datetime | None


def candidates(tx: Tx) -> list[ShadowedVersion]:
    """Which candidates are shadowing, of every profile."""
    return [
        ShadowedVersion(
            run_id=run_id,
            adapter_id=adapter.id,
            profile=adapter.profile,
            name=adapter.name,
            policy=get_run(tx, run_id).spec.shadow,
        )
        for run_id, adapter in under_way(tx, (RunState.SHADOWING,))
        if adapter.state not in (AdapterState.LIVE, AdapterState.REVOKED)
    ]


@dataclass(frozen=True)
class Added:
    num: int
    """How many were stored."""
    too_early: tuple[ShadowAnswer, ...]
    """Those whose experience is not there yet; without one nobody could have them forgotten."""


def add(tx: Tx, answers: Sequence[ShadowAnswer]) -> Added:
    """Store what is wanted: not of a run that shadows no more, nor of somebody forgotten."""
    num, too_early = 0, list[ShadowAnswer]()
    for answer in answers:
        query = sa.select(runs.c.profile).where(runs.c.id == answer.run_id, runs.c.state == RunState.SHADOWING)
        run = tx.first(query)
        if run is None:
            continue
        if _held(tx, run["profile"], answer.response_id):
            values = {**vars(answer), "flags": list(answer.flags), "live_flags": list(answer.live_flags)}
            num += tx.insert_if_absent(shadow_answers, **values, observed_at=tx.now)
        elif not _held(tx, run["profile"], tombstone_key(answer.response_id)):
            too_early.append(answer)
    return Added(num, tuple(too_early))


def _held(tx: Tx, profile: str, natural_key: str) -> bool:
    """Whether there is an experience with this key, held until we are done, so that nobody forgets it before we have
    stored ours. One that somebody else holds right now is not waited for."""
    mine = (experiences.c.profile == profile, experiences.c.natural_key == natural_key)
    return tx.first(sa.select(experiences.c.id).where(*mine).with_for_update(skip_locked=True)) is not None


def observed(tx: Tx, run_id: str) -> list[Observed]:
    """Every mirrored request of a run, in the order in which they were stored."""
    table = shadow_answers
    query = sa.select(table.c.outcome, table.c.flags, table.c.live_flags).where(table.c.run_id == run_id)
    return [
        Observed(ShadowOutcome(row["outcome"]), bool(row["flags"]), bool(row["live_flags"]))
        for row in tx.all(query.order_by(table.c.seq))
    ]


def progress(tx: Tx, run_id: str) -> Progress | None:
    """What `run show` tells about a shadow; None where nothing was mirrored."""
    table = shadow_answers
    rows = tx.all(sa.select(table).where(table.c.run_id == run_id).order_by(table.c.seq))
    if not rows:
        return None
    answered = [row for row in rows if row["outcome"] == ShadowOutcome.ANSWERED]
    return Progress(
        num=len(rows),
        num_failed=sum(row["outcome"] == ShadowOutcome.FAILED for row in rows),
        num_timed_out=sum(row["outcome"] == ShadowOutcome.TIMED_OUT for row in rows),
        num_flagged=sum(bool(row["flags"]) for row in answered),
        num_live_flagged=sum(bool(row["live_flags"]) for row in answered),
        seconds=sum(row["seconds"] for row in answered) / len(answered) if answered else None,
        live_seconds=sum(row["live_seconds"] for row in answered) / len(answered) if answered else None,
        first_at=min(row["observed_at"] for row in rows),
    )


def has_passed(tx: Tx, run_id: str) -> bool:
    """Whether the run's candidate has shadowed long and well enough before; its history says so."""
    passed = (events.c.old_state == RunState.SHADOWING, events.c.new_state == RunState.EVALUATING)
    query = sa.select(events.c.seq).where(events.c.entity == "run", events.c.entity_id == run_id, *passed)
    return tx.first(query.limit(1)) is not None


def erase(tx: Tx, profile: str, response_id: str) -> None:
    """Whoever is forgotten as an experience is forgotten here: the whole row goes."""
    of_profile = sa.select(runs.c.id).where(runs.c.profile == profile)
    tx.run(
        shadow_answers.delete().where(
            shadow_answers.c.response_id == response_id, shadow_answers.c.run_id.in_(of_profile)
        )
    )
