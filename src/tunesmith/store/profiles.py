"""What the store knows of a profile: its lock. The profile itself is a file."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.domain.profile import ProfileLock
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.tables import profiles


def lock_of(tx: Tx, name: str) -> ProfileLock | None:
    row = tx.first(sa.select(profiles.c.lock).where(profiles.c.name == name))
    return None if row is None else ProfileLock.model_validate(row["lock"])


def lock(tx: Tx, name: str, facts: ProfileLock, *, actor: str) -> ProfileLock:
    """Lock a profile's facts; the first lock stays, whoever comes second."""
    if tx.add_once(profiles, name=name, lock=facts.model_dump(mode="json"), locked_at=tx.now):
        events.record(tx, "profile", name, "locked", actor=actor, detail=facts.model_dump(mode="json"))
        return facts
    locked = lock_of(tx, name)
    assert locked is not None
    return locked
