"""Campaigns: a profile under way with overrides, and the counters its breaker reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from tunesmith.core.errors import Refused
from tunesmith.core.ids import new_id
from tunesmith.profiles.rules.campaign import CAMPAIGN, CampaignState, CounterEffect, Counters, after_end
from tunesmith.profiles.tables import campaigns
from tunesmith.store import events
from tunesmith.store.database import Tx, broke
from tunesmith.store.lookup import find_one, get_one, move_guarded


@dataclass(frozen=True)
class Campaign:
    id: str
    profile: str
    state: CampaignState
    overrides: dict[str, Any]
    budget: dict[str, Any]
    code_version: str
    config_hash: str
    parent_id: str | None
    counters: Counters
    created_at: datetime


def add(
    tx: Tx,
    profile: str,
    *,
    overrides: dict[str, Any],
    budget: dict[str, Any],
    code_version: str,
    config_hash: str,
    actor: str,
) -> Campaign:
    """A new active campaign; its parent is the profile's last one. At most one is active per profile."""
    campaign_id = new_id("camp")
    previous = next(iter(listing(tx, profile)), None)
    try:
        tx.run(
            campaigns.insert().values(
                id=campaign_id,
                profile=profile,
                state=CampaignState.ACTIVE,
                overrides=overrides,
                budget=budget,
                code_version=code_version,
                config_hash=config_hash,
                parent_id=previous.id if previous else None,
                counters=_encode(Counters()),
                created_at=tx.now,
            )
        )
    except exc.IntegrityError as error:
        raise _meaning(error, profile) from error
    moved = (None, CampaignState.ACTIVE)
    events.record(tx, "campaign", campaign_id, "created", actor=actor, moved=moved, detail={"overrides": overrides})
    return get(tx, campaign_id)


def move(tx: Tx, campaign_id: str, new: CampaignState, *, actor: str, reason: str) -> None:
    """The one setter of a campaign's state."""
    campaign = get(tx, campaign_id)
    CAMPAIGN.check(campaign_id, campaign.state, new)
    try:
        move_guarded(tx, campaigns, campaign_id, campaign.state, state=new)
    except exc.IntegrityError as error:
        raise _meaning(error, campaign.profile) from error
    events.record(tx, "campaign", campaign_id, "moved", actor=actor, moved=(campaign.state, new), reason=reason)


def count_end(tx: Tx, campaign_id: str, effect: CounterEffect) -> None:
    """Let the end of a run count for its campaign."""
    query = sa.select(campaigns.c.counters).where(campaigns.c.id == campaign_id)
    row = tx.first(query.with_for_update())
    assert row is not None, campaign_id
    counters = after_end(_decode(row["counters"]), effect, tx.now)
    tx.run(campaigns.update().where(campaigns.c.id == campaign_id).values(counters=_encode(counters)))


def active(tx: Tx, profile: str) -> Campaign | None:
    row = tx.first(sa.select(campaigns).where(campaigns.c.profile == profile, sa.text("state = 'active'")))
    return None if row is None else _campaign(row)


def all_active(tx: Tx) -> list[Campaign]:
    """The active campaigns of every profile."""
    return [_campaign(row) for row in tx.all(sa.select(campaigns).where(sa.text("state = 'active'")))]


def get(tx: Tx, campaign_id: str) -> Campaign:
    return _campaign(get_one(tx, campaigns, campaign_id))


def find(tx: Tx, text: str) -> Campaign:
    return _campaign(find_one(tx, campaigns, "camp", text))


def listing(tx: Tx, profile: str | None = None) -> list[Campaign]:
    """Newest first."""
    query = sa.select(campaigns).order_by(campaigns.c.seq.desc())
    if profile is not None:
        query = query.where(campaigns.c.profile == profile)
    return [_campaign(row) for row in tx.all(query)]


def _meaning(error: exc.IntegrityError, profile: str) -> Exception:
    if broke(error, "uq_campaigns_active", "campaigns.profile"):
        return Refused(f"profile {profile} has an active campaign already; pause or archive it first")
    return error


def _encode(counters: Counters) -> dict[str, Any]:
    return {
        "failures": [at.isoformat() for at in counters.failures],
        "num_rejections": counters.num_rejections,
        "last_rejected_at": counters.last_rejected_at.isoformat() if counters.last_rejected_at else None,
        "last_success_at": counters.last_success_at.isoformat() if counters.last_success_at else None,
    }


def _decode(raw: dict[str, Any]) -> Counters:
    def instant(text: str | None) -> datetime | None:
        return None if text is None else datetime.fromisoformat(text)

    return Counters(
        failures=tuple(datetime.fromisoformat(text) for text in raw["failures"]),
        num_rejections=raw["num_rejections"],
        last_rejected_at=instant(raw["last_rejected_at"]),
        last_success_at=instant(raw["last_success_at"]),
    )


def _campaign(row: sa.RowMapping) -> Campaign:
    fields: dict[str, Any] = {name: value for name, value in row.items() if name != "seq"}
    return Campaign(**{**fields, "state": CampaignState(row["state"]), "counters": _decode(row["counters"])})
