"""A store whose lock knows no base digest opens: it takes that of the version that is live."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from support.databases import an_empty_url, upgrade_to
from support.rows import ARCHITECTURE
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.runs.queries import profile_locks
from tunesmith.store.database import connect
from tunesmith.store.schema import open_store

LOCK = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1, validation_share=0.05)


@pytest.fixture(params=["sqlite", "postgres"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Three profiles: one with a live version, one that knows its digest already, one that never had a version."""
    url = an_empty_url(request, tmp_path)
    database = connect(url)
    known = LOCK.model_copy(update={"base_digest": "known"})
    with database.write() as tx:
        upgrade_to(tx, "0006")
        add_profile = sa.text("INSERT INTO profiles (name, lock, locked_at) VALUES (:name, :lock, 0)")
        for name, lock in (("served", LOCK), ("knows", known), ("new", LOCK)):
            tx.conn.execute(add_profile, {"name": name, "lock": lock.model_dump_json(exclude={"is_split_decided"})})
        add_version = sa.text(
            "INSERT INTO adapters (id, profile, version, state, path, digest, base_digest, metrics, created_at) "
            "VALUES (:id, :name, 1, 'live', 'p', 'd', 'of the live one', '{}', 0)"
        )
        for name in ("served", "knows"):
            tx.conn.execute(add_version, {"id": f"ad-{name}", "name": name})
    database.close()
    return url


def test_a_lock_without_a_digest_takes_that_of_what_is_live(old_url: str) -> None:
    store = open_store(old_url)
    with store.read() as tx:
        assert profile_locks.base_digests(tx) == {"served": "of the live one", "knows": "known"}
        lock = profile_locks.lock_of(tx, "served")
    assert lock is not None
    assert (lock.base_digest, lock.architecture) == ("of the live one", LOCK.architecture)
    store.close()
