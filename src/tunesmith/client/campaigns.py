"""`client.campaigns`: put a profile under way with overrides, pause, resume, archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.orchestration.check import check
from tunesmith.orchestration.rounds.facts import RoundStatus, round_status
from tunesmith.orchestration.rounds.open import open_asked
from tunesmith.orchestration.submit import Submitted
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.queries import Campaign, NewCampaign
from tunesmith.profiles.resolve import check_overrides
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.session import Session


class Campaigns:
    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        profile: str,
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        budget: Mapping[str, float] | None = None,
        name: str | None = None,
        description: str = "",
    ) -> Campaign:
        """Open an active campaign; its overrides hold for every run of the profile from now on."""
        session = self._session
        flat = check_overrides(overrides)
        checked, _, _ = check(session.database, session.workspace, profile, overrides=flat, environ=session.environ)
        with session.database.write() as tx:
            profiles.lock(tx, profile, checked.lock, actor=session.actor)
            new = NewCampaign(
                profile,
                overrides=flat,
                budget=dict(budget or {}),
                code_version=code_fingerprint(),
                config_hash=checked.resolved.fingerprint,
                name=name,
                description=description,
            )
            return campaigns.add(tx, new, actor=session.actor)

    def list(self, profile: str | None = None) -> list[Campaign]:
        profile = self._session.known_profile(profile)
        with self._session.database.read() as tx:
            return campaigns.listing(tx, profile)

    def show(self, campaign_id: str) -> Campaign:
        with self._session.database.read() as tx:
            return campaigns.find(tx, campaign_id)

    def next_round(self, campaign_id: str) -> RoundStatus:
        """Why a campaign opens its next round now, or why not: every condition with its value and threshold."""
        session = self._session
        return round_status(session.database, session.workspace, self.show(campaign_id), environ=session.environ)

    def trigger(self, campaign_id: str) -> Submitted:
        """Open a round now. Raises Refused with everything that a person may not waive either."""
        session, campaign = self._session, self.show(campaign_id)
        return open_asked(session.database, session.workspace, campaign, actor=session.actor, environ=session.environ)

    def pause(self, campaign_id: str) -> Campaign:
        return self._move(campaign_id, CampaignState.PAUSED)

    def resume(self, campaign_id: str) -> Campaign:
        return self._move(campaign_id, CampaignState.ACTIVE)

    def archive(self, campaign_id: str) -> Campaign:
        return self._move(campaign_id, CampaignState.ARCHIVED)

    def _move(self, campaign_id: str, state: CampaignState) -> Campaign:
        actor = self._session.actor
        with self._session.database.write() as tx:
            campaign = campaigns.find(tx, campaign_id)
            if state is CampaignState.ARCHIVED and campaign.state is CampaignState.ACTIVE:
                campaigns.move(tx, campaign.id, CampaignState.PAUSED, actor=actor, reason=f"to be archived by {actor}")
            campaigns.move(tx, campaign.id, state, actor=actor, reason=f"{state} by {actor}")
            return campaigns.get(tx, campaign.id)
