"""Money: what is reserved or spent never passes the budget, whoever asks at the same time and whoever dies."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from support.rows import ACTOR, PROFILE, a_profile, moves
from tunesmith.core.errors import Conflict
from tunesmith.curriculum.queries import spends
from tunesmith.curriculum.queries.spends import Charge, OverBudget
from tunesmith.curriculum.rules.cycle import SpendState, Spent
from tunesmith.curriculum.tables import spends as table
from tunesmith.profiles.sections.curriculum import SpendLimits
from tunesmith.store import events
from tunesmith.store.database import Database

PURPOSE = "curriculum"
ENOUGH = SpendLimits(per_cycle=10**12, per_month=10**12)


def a_charge(entity: str, amount: int = 100_000, cycle: str = "cyc-1", profile: str = PROFILE) -> Charge:
    return Charge(profile, PURPOSE, cycle, entity, amount)


def reserve(database: Database, charge: Charge, limits: SpendLimits = ENOUGH) -> str | None:
    """Its id; None: there was no money."""
    try:
        with database.write() as tx:
            return spends.reserve(tx, charge, limits)
    except OverBudget:
        return None


@pytest.fixture(autouse=True)
def _profile(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
        a_profile(tx, "other")


def total(database: Database, cycle: str | None = "cyc-1", profile: str = PROFILE) -> Spent:
    with database.read() as tx:
        return spends.spent(tx, profile, PURPOSE, cycle)


@pytest.mark.parametrize(
    "limits", [SpendLimits(1_000_000, 10**12), SpendLimits(10**12, 1_000_000)], ids=["cycle", "month"]
)
def test_hundred_parallel_calls_on_a_budget_for_ten_never_pass_it(database: Database, limits: SpendLimits) -> None:
    def call(number: int) -> bool:
        spend_id = reserve(database, a_charge(f"xp-{number}"), limits)
        assert total(database).month <= 1_000_000
        if spend_id is None:
            return False
        with database.write() as tx:
            spends.settle(tx, spend_id, None)
        return True

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(call, range(100)))
    assert sum(made) == 10
    assert total(database) == Spent(1_000_000, 1_000_000)


def test_what_is_settled_for_less_leaves_room_and_the_sum_is_exact(database: Database) -> None:
    limits, rng = SpendLimits(1_000_000, 1_000_000), random.Random(7)

    def call(number: int) -> int:
        spend_id = reserve(database, a_charge(f"xp-{number}", 90_001), limits)
        if spend_id is None:
            return 0
        with database.write() as tx:
            return spends.settle(tx, spend_id, rng.randrange(30_000))

    with ThreadPoolExecutor(8) as pool:
        costs = list(pool.map(call, range(200)))
    assert sum(costs) == total(database).cycle <= 1_000_000
    assert sum(cost > 0 for cost in costs) > 11


def test_budget_to_the_last_millionth_is_used_and_no_more(database: Database) -> None:
    limits = SpendLimits(300, 10**12)
    assert reserve(database, a_charge("xp-1", 200), limits) is not None
    assert reserve(database, a_charge("xp-2", 101), limits) is None
    assert reserve(database, a_charge("xp-3", 100), limits) is not None
    assert reserve(database, a_charge("xp-4", 1), limits) is None
    assert reserve(database, a_charge("xp-5", 0), limits) is not None


def test_cycles_months_and_profiles_are_counted_apart(database: Database) -> None:
    reserve(database, a_charge("xp-1", 5, cycle="cyc-1"))
    reserve(database, a_charge("xp-2", 7, cycle="cyc-2"))
    reserve(database, a_charge("xp-3", 11, profile="other"))
    old = reserve(database, a_charge("xp-4", 13, cycle="cyc-2"))
    with database.write() as tx:
        tx.run(table.update().where(table.c.id == old).values(created_at=tx.now - timedelta(days=40)))
    assert total(database, "cyc-1") == Spent(5, 12)
    assert total(database, "cyc-2") == Spent(20, 12)
    assert total(database, None) == Spent(0, 12)


def test_two_who_pay_for_the_same_are_one(database: Database) -> None:
    first = reserve(database, a_charge("xp-1"))
    with pytest.raises(Conflict, match="xp-1 is being paid for"):
        reserve(database, a_charge("xp-1"))
    with database.write() as tx:
        spends.settle(tx, str(first), 5)
    assert reserve(database, a_charge("xp-1")) is not None


def test_settled_spend_stays_as_it_is(database: Database) -> None:
    spend_id = str(reserve(database, a_charge("xp-1", 50)))
    with database.write() as tx:
        assert spends.settle(tx, spend_id, 20) == 20
        assert spends.settle(tx, spend_id, 0) == 20
        assert spends.settle(tx, spend_id, None) == 20
    assert total(database).month == 20


def test_unknown_cost_counts_as_all_that_was_reserved(database: Database) -> None:
    spend_id = str(reserve(database, a_charge("xp-1", 50)))
    with database.write() as tx:
        assert spends.settle(tx, spend_id, None) == 50


def test_abandoned_reservation_counts_and_is_settled_as_spent_by_the_sweep(database: Database) -> None:
    limits = SpendLimits(100, 100)
    spend_id = str(reserve(database, a_charge("xp-1", 60), limits))
    assert reserve(database, a_charge("xp-2", 60), limits) is None
    with database.write() as tx:
        assert spends.settle_abandoned(tx, timedelta(hours=1), actor=ACTOR) == 0
        tx.run(table.update().values(created_at=tx.now - timedelta(hours=2)))
        assert spends.settle_abandoned(tx, timedelta(hours=1), actor=ACTOR) == 1
        assert spends.settle_abandoned(tx, timedelta(hours=1), actor=ACTOR) == 0
        row = tx.first(sa.select(table).where(table.c.id == spend_id))
        assert row is not None
        assert (row["state"], row["amount"]) == (SpendState.SETTLED, 60)
        assert spends.settle(tx, spend_id, 1) == 60, "whoever comes back late changes nothing"
        told = [event for event in events.of_entity(tx, "profile", PROFILE) if event.action == "spend_abandoned"]
        assert len(told) == 1
        assert moves(tx, "profile", PROFILE) == []
    assert reserve(database, a_charge("xp-2", 60), limits) is None
