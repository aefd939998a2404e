"""A store of the schema before opens: an active campaign stays in force, a paused one keeps having no say."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.databases import an_empty_url, upgrade_to
from support.rows import ACTOR, ARCHITECTURE
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.store.database import connect
from tunesmith.store.schema import open_store

LOCK = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1, validation_share=0.05)
COUNTERS = '{"failures": [], "num_rejections": 0, "last_rejected_at": null, "last_success_at": null}'
OLD = [("camp-1", "a", "archived"), ("camp-2", "a", "paused"), ("camp-3", "a", "active"),
       ("camp-4", "a-2", "paused"), ("camp-5", "b", "paused")]  # fmt: skip


@pytest.fixture(params=["sqlite", "postgres"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = an_empty_url(request, tmp_path)
    database = connect(url)
    with database.write() as tx:
        upgrade_to(tx, "0007")
        for name in ("a", "a-2", "b"):
            add = sa.text("INSERT INTO profiles (name, lock, locked_at) VALUES (:name, :lock, 0)")
            tx.conn.execute(add, {"name": name, "lock": LOCK.model_dump_json()})
        for number, (campaign_id, profile, state) in enumerate(OLD, start=1):
            add = sa.text(
                "INSERT INTO campaigns (id, profile, state, overrides, budget, code_version, config_hash, counters, "
                "created_at) VALUES (:id, :profile, :state, '{}', '{}', 'c', 'h', :counters, :at)"
            )
            values = {"id": campaign_id, "profile": profile, "state": state, "counters": COUNTERS}
            tx.conn.execute(add, {**values, "at": number * 1_000_000})
    database.close()
    return url


def test_earlier_campaigns_get_names_and_keep_their_say(old_url: str) -> None:
    store = open_store(old_url)
    with store.read() as tx:
        found = {each.id: each for each in campaigns.listing(tx)}
        assert [found[key].name for key, _, _ in OLD] == ["a", "a-2", "a-3", "a-2-2", "b"]
        assert [key for key, _, _ in OLD if found[key].in_force] == ["camp-3"]
        assert found["camp-2"].moved_at == datetime.fromtimestamp(2, UTC)
        assert campaigns.in_force(tx, "b") is None, "it was paused before: its overrides do not come back by themselves"
        assert campaigns.find(tx, "a-3").id == "camp-3"
    with store.write() as tx:
        campaigns.move(tx, "camp-5", CampaignState.ACTIVE, actor=ACTOR, reason="x")
        campaigns.move(tx, "camp-5", CampaignState.PAUSED, actor=ACTOR, reason="x")
        kept = campaigns.in_force(tx, "b")
        assert kept is not None
        assert kept.id == "camp-5", "paused from now on, it keeps its overrides"
    store.close()


def test_one_campaign_of_a_profile_is_in_force(old_url: str) -> None:
    store = open_store(old_url)
    with store.write() as tx:
        campaigns.move(tx, "camp-3", CampaignState.PAUSED, actor=ACTOR, reason="x")
        campaigns.move(tx, "camp-2", CampaignState.ACTIVE, actor=ACTOR, reason="x")
        assert [each.id for each in campaigns.all_in_force(tx)] == ["camp-2"]
        campaigns.move(tx, "camp-2", CampaignState.PAUSED, actor=ACTOR, reason="x")
        campaigns.move(tx, "camp-2", CampaignState.ARCHIVED, actor=ACTOR, reason="x")
        assert campaigns.all_in_force(tx) == [], "that of the replaced one does not come back either"
    store.close()
