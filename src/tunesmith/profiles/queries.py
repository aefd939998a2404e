"""Campaigns: a profile under way with overrides, budget and the counters its breaker reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from tunesmith.core.errors import NotFound, Refused, quoted
from tunesmith.core.ids import is_id, is_name, new_id
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
    name: str
    description: str
    in_force: bool
    """Its overrides hold: it is active, or paused and nothing has taken its place."""
    moved_at: datetime
    """When it was created, paused, resumed or archived."""


@dataclass(frozen=True)
class NewCampaign:
    """What a campaign is created with."""

    profile: str
    overrides: dict[str, Any]
    budget: dict[str, Any]
    code_version: str
    config_hash: str
    name: str | None = None
    description: str = ""


def add(tx: Tx, new: NewCampaign, *, actor: str) -> Campaign:
    """A new active campaign; its parent is the profile's last one. At most one is active per profile.

    Without a name it gets that of the profile, and a number behind it if that is taken.
    """
    campaign_id, profile = new_id("camp"), new.profile
    previous = next(iter(listing(tx, profile)), None)
    _take_force(tx, profile, campaign_id, actor=actor)
    try:
        tx.run(
            campaigns.insert().values(
                id=campaign_id,
                profile=profile,
                state=CampaignState.ACTIVE,
                overrides=new.overrides,
                budget=new.budget,
                code_version=new.code_version,
                config_hash=new.config_hash,
                parent_id=previous.id if previous else None,
                counters=_encode(Counters()),
                created_at=tx.now,
                moved_at=tx.now,
                name=new.name or _free_name(tx, profile),
                description=new.description,
                in_force=True,
            )
        )
    except exc.IntegrityError as error:
        raise _meaning(error, profile, new.name) from error
    moved = (None, CampaignState.ACTIVE)
    events.record(tx, "campaign", campaign_id, "created", actor=actor, moved=moved, detail={"overrides": new.overrides})
    return get(tx, campaign_id)


def move(tx: Tx, campaign_id: str, new: CampaignState, *, actor: str, reason: str) -> None:
    """The one setter of a campaign's state."""
    campaign = get(tx, campaign_id)
    CAMPAIGN.check(campaign_id, campaign.state, new)
    if new is CampaignState.ACTIVE:
        _take_force(tx, campaign.profile, campaign_id, actor=actor)
    in_force = new is CampaignState.ACTIVE or (new is CampaignState.PAUSED and campaign.in_force)
    try:
        move_guarded(tx, campaigns, campaign_id, campaign.state, state=new, in_force=in_force, moved_at=tx.now)
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


def in_force(tx: Tx, profile: str) -> Campaign | None:
    """The campaign whose overrides hold for the profile."""
    row = tx.first(sa.select(campaigns).where(campaigns.c.profile == profile, sa.text("in_force")))
    return None if row is None else _campaign(row)


def all_in_force(tx: Tx) -> list[Campaign]:
    """The campaigns of every profile whose overrides hold."""
    return [_campaign(row) for row in tx.all(sa.select(campaigns).where(sa.text("in_force")))]


def all_active(tx: Tx) -> list[Campaign]:
    """The active campaigns of every profile: those that open rounds."""
    query = sa.select(campaigns).where(sa.text("state = 'active'")).order_by(campaigns.c.seq)
    return [_campaign(row) for row in tx.all(query)]


def get(tx: Tx, campaign_id: str) -> Campaign:
    return _campaign(get_one(tx, campaigns, campaign_id))


def find(tx: Tx, text: str) -> Campaign:
    """A campaign by name, by id, or by an unambiguous beginning of one."""
    named = tx.first(sa.select(campaigns).where(campaigns.c.name == text))
    if named is not None:
        return _campaign(named)
    if is_name(text) and not is_id(text):
        known = [row["name"] for row in tx.all(sa.select(campaigns.c.name))]
        raise NotFound.named("campaign", text, known, "`tunesmith campaign list` shows them")
    return _campaign(find_one(tx, campaigns, "camp", text))


def listing(tx: Tx, profile: str | None = None) -> list[Campaign]:
    """Newest first."""
    query = sa.select(campaigns).order_by(campaigns.c.seq.desc())
    if profile is not None:
        query = query.where(campaigns.c.profile == profile)
    return [_campaign(row) for row in tx.all(query)]


def _take_force(tx: Tx, profile: str, campaign_id: str, *, actor: str) -> None:
    """The overrides of a paused campaign end when another one of the profile becomes active."""
    others = (campaigns.c.profile == profile, campaigns.c.id != campaign_id, sa.text("in_force AND state <> 'active'"))
    for row in tx.all(sa.select(campaigns.c.id).where(*others)):
        tx.run(campaigns.update().where(campaigns.c.id == row["id"]).values(in_force=False))
        reason = f"its overrides no longer hold: campaign {campaign_id} is active"
        events.record(tx, "campaign", row["id"], "replaced", actor=actor, reason=reason)


def _free_name(tx: Tx, profile: str) -> str:
    taken = {row["name"] for row in tx.all(sa.select(campaigns.c.name))}
    numbered = (f"{profile}-{number}" for number in count(2))
    return next(name for name in chain([profile], numbered) if name not in taken)


def _meaning(error: exc.IntegrityError, profile: str, name: str | None = None) -> Exception:
    if broke(error, "uq_campaigns_name", "campaigns.name"):
        return Refused(f"another campaign is called {quoted(str(name))}; choose another name")
    if broke(error, "uq_campaigns_active", "campaigns.profile") or broke(error, "uq_campaigns_in_force", "-"):
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
