"""What the store knows of a profile: its lock. The profile itself is a file."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import LockedError, Refused
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.profiles.tables import profiles
from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.tables import attempts, runs, tasks
from tunesmith.store import events
from tunesmith.store.database import Tx


def lock_of(tx: Tx, name: str) -> ProfileLock | None:
    """The lock of a profile; its shares are decided by a run that has trained, or still may."""
    row = tx.first(sa.select(profiles.c.lock).where(profiles.c.name == name))
    if row is None:
        return None
    decided = {"is_split_decided": _has_trained_or_may(tx, runs.c.profile == name)}
    return ProfileLock.model_validate(row["lock"]).model_copy(update=decided)


def lock(tx: Tx, name: str, facts: ProfileLock, *, actor: str) -> ProfileLock:
    """Lock a profile's facts; the first lock stays, whoever comes second."""
    if tx.insert_if_absent(profiles, name=name, lock=_stored(facts), locked_at=tx.now):
        events.record(tx, "profile", name, "locked", actor=actor, detail=_stored(facts))
    locked = lock_of(tx, name)
    assert locked is not None
    if locked.base_digest is None and facts.base_digest is not None and locked.architecture == facts.architecture:
        locked = locked.model_copy(update={"base_digest": facts.base_digest})
        _write(tx, name, locked)
        events.record(tx, "profile", name, "locked", actor=actor, detail={"base_digest": facts.base_digest})
    return locked


def base_digests(tx: Tx) -> dict[str, str]:
    """By profile, the digest of the base that it was locked with."""
    locked = {
        row["name"]: row["lock"].get("base_digest") for row in tx.all(sa.select(profiles.c.name, profiles.c.lock))
    }
    return {name: digest for name, digest in locked.items() if digest is not None}


def decide_split(
    tx: Tx, name: str, dataset_id: str, shares: tuple[float, float], split_number: int, *, actor: str
) -> None:
    """A run that trains is about to be queued on a dataset that was split by these shares.

    The first such run decides the shares. Later ones need a dataset of the same split, or one that was trained on.
    Where the split was changed beside a run that never trained, some datasets have kept its splits and others have not,
    under one number: the first that is trained on gets a number of its own, and the others are made again.
    """
    if tx.is_postgres:
        tx.first(sa.select(profiles.c.name).where(profiles.c.name == name).with_for_update())
    locked = lock_of(tx, name)
    if locked is None or _has_trained_or_may(tx, runs.c.dataset_id == dataset_id):
        return
    of_lock = (locked.heldout_share, locked.validation_share)
    if not locked.is_split_decided:
        number = locked.split_number + 1 if locked.split_number else 0
        if of_lock != shares or number:
            change = {"heldout_share": shares[0], "validation_share": shares[1], "split_number": number}
            _write(tx, name, locked.model_copy(update=change))
            events.record(tx, "profile", name, "split_decided", actor=actor, detail=change)
        return
    if (of_lock, locked.split_number) != (shares, split_number):
        raise LockedError(
            f"dataset {dataset_id} was split by data.heldout_share {shares[0]:g} and data.validation_share "
            f"{shares[1]:g}, and {name} has another split by now ({of_lock[0]:g} and {of_lock[1]:g}); "
            "prepare or assemble it again"
        )


def change_split(tx: Tx, name: str, facts: ProfileLock, *, actor: str, reason: str) -> ProfileLock:
    """Split new prompts by other shares from now on; what was trained on or held out before keeps its split."""
    if tx.is_postgres:
        tx.first(sa.select(profiles.c.name).where(profiles.c.name == name).with_for_update())
    locked = lock_of(tx, name)
    assert locked is not None, name
    change = {"heldout_share": facts.heldout_share, "validation_share": facts.validation_share}
    if all(getattr(locked, key) == value for key, value in change.items()):
        raise Refused(
            f"the split of {name} is data.heldout_share {locked.heldout_share:g} and data.validation_share "
            f"{locked.validation_share:g} already; change them in the profile first"
        )
    now = locked.model_copy(update={**change, "split_number": locked.split_number + locked.is_split_decided})
    _write(tx, name, now)
    detail = {**change, "was_heldout_share": locked.heldout_share, "was_validation_share": locked.validation_share}
    events.record(tx, "profile", name, "split_changed", actor=actor, reason=reason, detail=detail)
    return now


def trained_datasets(profile: str) -> sa.Select[Any]:
    """The ids of a profile's datasets that a run has trained on, or still may."""
    return sa.select(runs.c.dataset_id).where(runs.c.profile == profile, _TRAINS)


_HAS_BEGUN = sa.exists().where(
    tasks.c.run_id == runs.c.id, tasks.c.kind == TaskKind.TRAIN.value, attempts.c.task_id == tasks.c.id
)
_TRAINS = sa.and_(
    sa.not_(sa.func.coalesce(runs.c.spec["dry_run"].as_boolean(), False)),
    sa.or_(runs.c.finished_at.is_(None), _HAS_BEGUN),
)
"""A run that ended before its first attempt at training has learnt nothing, and decides nothing."""


def _has_trained_or_may(tx: Tx, condition: sa.ColumnElement[bool]) -> bool:
    """Whether such a run has trained, or still may."""
    return tx.first(sa.select(runs.c.id).where(condition, _TRAINS).limit(1)) is not None


def _write(tx: Tx, name: str, facts: ProfileLock) -> None:
    tx.run(profiles.update().where(profiles.c.name == name).values(lock=_stored(facts)))


def _stored(facts: ProfileLock) -> dict[str, Any]:
    return facts.model_dump(mode="json", exclude={"is_split_decided"})
