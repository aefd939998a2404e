"""What the store knows of a profile: its lock. The profile itself is a file."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.domain.adapter import AdapterState
from tunesmith.domain.profile import ProfileLock
from tunesmith.store import events
from tunesmith.store.database import Tx
from tunesmith.store.tables import adapters, profiles


def lock_of(tx: Tx, name: str) -> ProfileLock | None:
    """Where an older tunesmith locked it without its base's digest, that of what is live counts."""
    row = tx.first(sa.select(profiles.c.lock).where(profiles.c.name == name))
    if row is None:
        return None
    locked = ProfileLock.model_validate(row["lock"])
    if locked.base_digest is not None:
        return locked
    is_live = (adapters.c.profile == name, adapters.c.state == AdapterState.LIVE)
    live = tx.first(sa.select(adapters.c.base_digest).where(*is_live))
    return locked if live is None else locked.model_copy(update={"base_digest": live["base_digest"]})


def lock(tx: Tx, name: str, facts: ProfileLock, *, actor: str) -> ProfileLock:
    """Lock a profile's facts; the first lock stays, whoever comes second."""
    if tx.add_once(profiles, name=name, lock=facts.model_dump(mode="json"), locked_at=tx.now):
        events.record(tx, "profile", name, "locked", actor=actor, detail=facts.model_dump(mode="json"))
        return facts
    locked = lock_of(tx, name)
    assert locked is not None
    if locked.base_digest is None and facts.base_digest is not None and locked.architecture == facts.architecture:
        locked = locked.model_copy(update={"base_digest": facts.base_digest})
        tx.run(profiles.update().where(profiles.c.name == name).values(lock=locked.model_dump(mode="json")))
        events.record(tx, "profile", name, "locked", actor=actor, detail={"base_digest": facts.base_digest})
    return locked


def base_digests(tx: Tx) -> dict[str, str]:
    """By profile, the digest of the base that it was locked with."""
    rows = tx.all(sa.select(profiles.c.name, profiles.c.lock))
    return {row["name"]: row["lock"]["base_digest"] for row in rows if row["lock"].get("base_digest") is not None}
