"""The first write of something that is there once, from two at a time: one row, and nobody is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from support import tables
from support.rows import ACTOR, PROFILE, a_profile, an_adapter
from tunesmith.deployment import queries as deployments
from tunesmith.experience.queries import experiences
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.queries import switches
from tunesmith.store.database import Database, Tx


def _at_once(database: Database, action: Callable[[Tx, int], object]) -> list[object]:
    """The second looks before the first has committed; what both got."""

    def second() -> object:
        with database.write() as tx:
            return action(tx, 2)

    with ThreadPoolExecutor(1) as pool:
        with database.write() as tx:
            first = action(tx, 1)
            waiting = pool.submit(second)
            time.sleep(0.2)
        return [first, waiting.result(10)]


def _num(database: Database, table: sa.Table) -> int:
    with database.read() as tx:
        return int(tx.conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_one_experience_per_natural_key(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
    messages = [{"role": "user", "content": "hello"}]
    ids = _at_once(database, lambda tx, n: experiences.add(tx, PROFILE, "key", messages, actor=ACTOR)[0])
    assert len(set(ids)) == 1
    assert _num(database, tables.experiences) == 1
    with database.read() as tx:
        captured = sa.select(sa.func.count()).where(tables.events.c.action == "captured")
        assert tx.conn.execute(captured).scalar_one() == 1


def test_one_row_per_switch(database: Database) -> None:
    _at_once(database, lambda tx, n: switches.turn(tx, switches.ESTOP, True, actor=f"user:{n}", reason="smoke"))
    assert _num(database, tables.switches) == 1
    with database.read() as tx:
        assert switches.is_on(tx, switches.ESTOP)


def test_one_observation_per_target(database: Database) -> None:
    with database.write() as tx:
        adapter = an_adapter(tx, AdapterState.LIVE)
    _at_once(database, lambda tx, n: deployments.observe(tx, PROFILE, "directory", adapter_id=adapter.id, error=None))
    assert _num(database, tables.observations) == 1


def test_first_lock_of_a_profile_stays(database: Database) -> None:
    from support.rows import ARCHITECTURE

    def lock(tx: Tx, number: int) -> ProfileLock:
        facts = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1 + number / 100, validation_share=0.05)
        return profiles.lock(tx, PROFILE, facts, actor=ACTOR)

    locks = _at_once(database, lock)
    assert len({str(found) for found in locks}) == 1
    assert _num(database, tables.profiles) == 1
